"""A decoder-only GPT: RMSNorm, rotary positions, SwiGLU, an untied head, no biases.

Shape letters: B batch, T tokens of a sequence, D width, H heads, d width of a head (D = H * d),
G heads of keys and values, F hidden width of the MLP, V vocabulary.

Names matter to `float8.convert`, which leaves layers that match its `keep` list in high precision:
`lm_head` is on that list; the projections of attention and MLP (Llama's wq wk wv wo w1 w2 w3) are
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    layers: int
    dim: int
    heads: int
    hidden: int
    vocab: int = 256
    kv_heads: int | None = None  # of keys and values, each shared by heads / kv_heads; None: heads

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):  # rotary positions turn pairs of a head's channels
            raise ValueError(
                f"a width of {self.dim} does not divide into {self.heads} heads of even width; "
                f"--dim must be a multiple of {2 * self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values evenly; "
                "--kv-heads must divide --heads"
            )


def rope_angles(positions: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """Angle of each channel pair at each position: float32 [T, d / 2] (arXiv 2104.09864)."""
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    return positions.float()[:, None] * base**-exponents


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + d/2) of x [B, H, T, d] by their angles, in float32."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal; heads may share keys and values (arXiv 2305.13245)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.dim // config.heads
        kv_dim = self.width * (config.kv_heads or config.heads)
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, H, T, d], or [B, T, G * d] to [B, G, T, d]."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        q, k, shared = rotate(q, angles), rotate(k, angles), q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.wo(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    float8_swiglu = ("w1", "w3", "w2")  # gate, up, down: `float8.convert` may run them as one

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config) if mlp is None else mlp

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    block: Callable[[GPTConfig], nn.Module] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(type(self).block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """N(0, 1 / fan-in); what adds to the residual is smaller by sqrt(2 layers), as in GPT-2."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = self.residual_scale if name.endswith(("wo", "w2", "down_proj")) else 1.0
                module.weight.normal_(std=scale * module.in_features**-0.5)
        self.embedding.weight.normal_()
        self.lm_head.weight.mul_(0.02)  # the first loss is log V

    @property
    def residual_scale(self) -> float:
        return float((2 * self.config.layers) ** -0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """int64 [B, T] to logits, float32 [B, T, V]; with targets, to the mean loss in nats."""
        x, angles = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x, targets)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the first block gets: [B, T, D], and the angles of the positions."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = rope_angles(positions, self.config.dim // self.config.heads)
        return self.embedding(tokens), angles

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """What the last block gives to logits, or to the loss."""
        logits = self.lm_head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of training on one token: 6 N + 12 layers D T (arXiv 2204.02311, appendix B).

        N counts the weights that multiply, so not the embedding: 2 N forward, 4 N backward. The two
        products of attention are 4 T D a layer forward, twice that backward, causal or not.
        """
        linears = (m for m in self.modules() if isinstance(m, nn.Linear))
        multiplied = sum(m.weight.numel() for m in linears)
        return 6 * multiplied + 12 * self.config.layers * self.config.dim * seq_len
