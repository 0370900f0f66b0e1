"""A mixture-of-experts layer: a router in high precision, SwiGLU experts as one call, and how
evenly they are used. ``float8.convert`` finds its experts like any others.

    scores = softmax(x @ router.T) or sigmoid(x @ router.T)
    y[t] = sum over the k best experts e of weights[t, e] * expert_e(x[t]), plus shared(x[t])

Shape letters: T tokens (all leading dimensions folded), k experts for each, E experts, D model
width, F hidden width, R rows sorted by expert.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import run_swiglu_experts
from .grouped import grouped_mm, grouped_operand, grouped_plans, plain
from .linear import NOT_CACHED, fold, unfold, whole
from .mlp import silu_times
from .permute import Routing, permute, route, unpermute
from .recipe import Recipe
from .weight import Float8Weight, begin

NO_FP8 = Recipe("high precision", None, None, None)


class Router(nn.Module):
    """Which experts a token goes to, and with what weights, in float32 whatever autocast says.

    Args:
        dim, experts, top_k: D, E and k.
        score: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437).

    The weights of a token are its k best scores, made to sum to 1 where there are several. (A
    single one would be 1 whatever the router says, which could then learn nothing.)

    Raises:
        ValueError: there are fewer than k experts, or ``score`` is unknown.
    """

    weight: nn.Parameter  # [E, D]

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        score: Literal["softmax", "sigmoid"] = "softmax",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} of {experts} experts; it must be 1 to {experts}")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={score!r} must be 'softmax' or 'sigmoid'")
        self.top_k, self.score = top_k, score
        self.weight = nn.Parameter(torch.empty(experts, dim, device=device, dtype=dtype))
        _init_uniform(self.weight)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, float32 [T, k]; experts, int64 [T, k]; probabilities, float32 [T, E]."""
        with _no_autocast(x_TD):
            logits = _logits(x_TD, self.weight.to(torch.float32))
        if self.score == "softmax":
            scores = probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = _shares(scores)
        weights, chosen = scores.topk(self.top_k, -1)
        if self.top_k > 1:
            weights = _shares(weights)
        return weights, chosen, probabilities

    def extra_repr(self) -> str:
        experts, dim = self.weight.shape
        return f"{dim}, {experts} experts, top_k={self.top_k}, score={self.score}"


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)  # "meta" has none


class _Logits(torch.autograd.Function):
    """x @ w.T in float32. Saved for backward: x as it is, which the experts keep too, where
    autograd would keep a float32 copy."""

    generate_vmap_rule = True  # and functorch passes, so that what the experts say is heard

    @staticmethod
    def forward(x_TD: Tensor, w_ED: Tensor) -> Tensor:
        return F.linear(x_TD.to(torch.float32), w_ED)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x_TD, w_ED = inputs
        needs_x, needs_w = ctx.needs_input_grad
        ctx.save_for_backward(x_TD if needs_w else None, w_ED if needs_x else None)

    @staticmethod
    def backward(ctx: Any, g_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, w_ED = ctx.saved_tensors
        g_x = g_w = None
        with _no_autocast(g_TE):  # compiled code has backward under forward's
            if x_TD is not None:
                # By way of the transpose, or compilers would find that forward has such a copy, and
                # keep that.
                g_w = g_TE.t() @ x_TD.t().to(torch.float32).t()
            if w_ED is not None:
                g_x = g_TE @ w_ED
        return g_x, g_w  # (Autograd casts a gradient to its input's dtype.)


_plain_logits = whole(_Logits)


def _logits(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    if type(w_ED) not in (Tensor, nn.Parameter):  # it knows how it multiplies
        return F.linear(x_TD.to(torch.float32), w_ED)
    logits: Tensor = _plain_logits(x_TD, w_ED)
    return logits


def _shares(scores: Tensor) -> Tensor:
    """Scores to sum to 1; all 0 stay so, as sigmoids of large negative numbers are (DeepSeek-V3's
    code adds 1e-20)."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)


class Experts(nn.Module):
    """E SwiGLU layers without bias, stacked: ``down_proj(silu(gate_proj(x)) * up_proj(x))`` of the
    rows of each.

    Its parameters are gate_proj and up_proj [E, F, D] and down_proj [E, D, F]. ``float8.convert``
    makes Float8Weights of them, which run as one ``float8.swiglu_experts``; without it they
    multiply in high precision.
    """

    gate_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        into, out = (experts, hidden, dim), (experts, dim, hidden)
        for name, shape in (("gate_proj", into), ("up_proj", into), ("down_proj", out)):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
            _init_uniform(getattr(self, name))

    def forward(self, x_TD: Tensor, routing: Routing, scores_Tk: Tensor) -> Tensor:
        """The sum of what its experts make of each token x [T, D], times their scores [T, k]."""
        weights = self.down_proj, self.gate_proj, self.up_proj
        recipes = [w.recipe if isinstance(w, Float8Weight) else NO_FP8 for w in weights]
        if any(recipe != recipes[0] for recipe in recipes):  # as a recipe map may say
            x_RD = permute(x_TD, routing)
            gate, up = (_product(x_RD, w, routing.offs) for w in weights[1:])
            y_RD = _product(silu_times(gate, up), self.down_proj, routing.offs)
            return unpermute(y_RD, routing, scores_Tk)
        plans = grouped_plans(recipes[0], x_TD.device)
        copies = [begin(w, plans) if isinstance(w, Float8Weight) else NOT_CACHED for w in weights]
        stacks, routed = [plain(w).mT for w in weights], (routing, scores_Tk)
        return run_swiglu_experts(x_TD, stacks, routing.offs, recipes[0], plans, copies, routed)

    def extra_repr(self) -> str:
        experts, hidden, dim = self.gate_proj.shape
        return f"{experts} experts, {dim}, {hidden}"


def _product(x: Tensor, w_ENK: Tensor, offs: Tensor) -> Tensor:
    if isinstance(w_ENK, Float8Weight):
        y: Tensor = torch._grouped_mm(x, w_ENK.mT, offs=offs)  # by its own recipe
        return y
    return grouped_mm(x, w_ENK.mT, offs, recipe=NO_FP8)


class SharedExpert(nn.Module):
    """The SwiGLU layer that every token goes through; ``float8.convert`` makes it one call."""

    float8_swiglu = ("gate_proj", "up_proj", "down_proj")

    def __init__(
        self, dim: int, hidden: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, False, device, dtype)
        self.up_proj = nn.Linear(dim, hidden, False, device, dtype)
        self.down_proj = nn.Linear(hidden, dim, False, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu_times(self.gate_proj(x), self.up_proj(x)))
        return y


class MoE(nn.Module):
    """A mixture-of-experts layer, whose forward gives its output and how the experts were used.

        moe = float8.MoE(1024, 2048, experts=64, top_k=8, shared_hidden=2048)
        float8.convert(model)               # experts and shared expert; the router stays as it is
        y, balance, counts = moe(x)         # loss = ... + 0.01 * balance

    No token is dropped, experts have no capacity, and one graph serves all routings. A layer keeps
    no statistics: recomputed under activation checkpointing, it counts nothing twice.

    On a GPU nothing waits for the sizes of experts, but where these are multiplied one by one: by
    PyTorch references of FP8 products, and in high precision where ``torch._grouped_mm`` does not
    take the operands, which are to be bf16, of features that are multiples of 8.

    Args:
        dim, hidden: D and F.
        experts, top_k: E and k.
        shared_hidden: hidden width of an expert for all tokens; 0 for none.
        score: as of ``Router``.
        device, dtype: of the parameters, as ``nn.Linear`` takes them.

    Raises:
        ValueError: as ``Router``.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        experts: int,
        top_k: int,
        shared_hidden: int = 0,
        score: Literal["softmax", "sigmoid"] = "softmax",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: Any = {"device": device, "dtype": dtype}
        self.router = Router(dim, experts, top_k, score, **place)
        self.experts = Experts(dim, hidden, experts, **place)
        self.shared = SharedExpert(dim, shared_hidden, **place) if shared_hidden else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] to

        y: [..., D], of x's dtype or autocast's.
        balance: ``balance_loss`` of this batch, float32 [].
        counts: the tokens of each expert, int32 [E]; their sum is T * k.
        """
        x_TD = fold(x)
        weights, chosen, probabilities = self.router(x_TD)
        x_TD = grouped_operand(x_TD, self.experts.gate_proj)
        routing = route(chosen, self.router.weight.shape[0])
        y_TD: Tensor = self.experts(x_TD, routing, weights)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return unfold(y_TD, x), balance_loss(probabilities, routing.counts), routing.counts


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4): E times the sum
    over experts of their share of tokens times their mean probability. 1 where all experts get as
    many, E where one gets all; its gradient flows to the router.

    Args:
        probabilities: float32 [T, E], of each token over all experts.
        counts: int32 [E], the tokens of each expert.

    Returns: float32 []; 0 of no tokens.
    """
    tokens, experts = probabilities.shape
    share = counts.to(torch.float32) / counts.sum().clamp(min=1)
    mean = probabilities.sum(0) / max(tokens, 1)
    loss: Tensor = experts * (share * mean).sum()
    return loss


@torch.no_grad()
def _init_uniform(weight: Tensor) -> None:
    """As nn.Linear has it: the variance of what comes out is a third of that of what goes in."""
    bound = max(1, weight.shape[-1]) ** -0.5
    weight.uniform_(-bound, bound)
