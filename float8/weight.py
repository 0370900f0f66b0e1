"""``Float8Weight``: a high-precision weight that multiplies in FP8, wherever it is multiplied.

Matrix products are caught in ``__torch_function__``, above autograd, and become ``float8.linear``'s
autograd function. All else reaches ``__torch_dispatch__``, below autograd, which runs it on the
plain tensor inside.

Letters: B batch or experts, M rows of x, N out features, K the contraction; T rows of x, sorted by
    expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils.hooks import RemovableHandle

from .devices import assumed_device
from .grouped import grouped_plans, run_grouped_mm
from .linear import NOT_CACHED, Cached, note_run, run_linear
from .recipe import ROWWISE, Cast, Gemm, Plans, Recipe, check_recipe
from .tensor import Float8TrainingTensor, refuse_functorch

aten = torch.ops.aten


@dataclass(unsafe_hash=True)
class _Record:
    """What a weight and its views share. All are equal: torch.compile guards on a tensor's
    metadata, and layers that differ in nothing else are to share compiled code."""

    last_run: tuple[str, str, str] | None = field(default=None, compare=False)
    # Within a block of float8.cached_weights what knows of it; torch.compile prints records.
    cached: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return _Record, (self.last_run,)  # copies outlive the block of float8.cached_weights


@dataclass(eq=False)
class Copies:
    """What float8.cached_weights makes of a Float8Weight, or its views have of that: FP8 copies
    (parts; Nones for a GEMM in high precision) of the weight and of its transpose, as forward casts
    weights, and, if dgrad casts them otherwise, the same as dgrad does; and what the weight's
    gradients are added to, if they are, with the matrix of it that a view has."""

    made: Any  # from what, which tells whether it has changed
    parts: tuple[Float8TrainingTensor | None, ...]
    total: Tensor | None = None
    matrix: int | None = None
    turned: bool = False

    def __deepcopy__(self, memo: Any) -> None:
        return None  # copies of the weight outlive the block


def _part(i: int) -> property:
    return property(lambda w: w.copies.parts[i])


class Float8Weight(torch.Tensor):
    """``original``, sharing its storage, whose matrix products run in FP8; gradients are plain.

    Products: ``F.linear``, ``@``, ``torch.matmul``, ``mm``, ``bmm``, ``mv``, ``addmm``, ``baddbmm``
    and ``torch.einsum`` of two operands, with the weight on either side, and ``F.grouped_mm``
    (``torch._grouped_mm``) with it on the right, meaning what they mean in torch. Views, casts and
    copies of it (``t``, ``w[e]``, ``chunk``, ``to``, ``clone``, ``cat`` of weights of one recipe,
    ...) are Float8Weights; results of other ops are plain tensors. Other ops that multiply matrices
    raise NotImplementedError: ``plain()`` multiplies in high precision.

    Args:
        original: strided, floating point, of any rank; [N, K] or [E, N, K] as a rule.
        recipe: how each of the three GEMMs runs.

    Raises:
        ValueError: ``original`` is of another kind, or ``recipe`` is no Recipe.
    """

    original: Tensor
    recipe: Recipe
    record: _Record
    copies: Copies | None = None
    # To torch.compile these are parts of the weight, and so inputs of graphs.
    copy0, copy1, copy2, copy3 = map(_part, range(4))
    total = property(lambda w: w.copies.total)

    @staticmethod
    def __new__(cls, original: Tensor, recipe: Recipe = ROWWISE) -> Float8Weight:
        check_recipe(recipe)
        strided = original.layout == torch.strided and not is_traceable_wrapper_subclass(original)
        if not strided or not _is_high_precision(original):
            raise ValueError(
                "a Float8Weight holds a plain strided tensor in high precision, but got a "
                f"{type(original).__name__} of {original.dtype} with layout {original.layout}"
            )
        return _build(original.detach(), recipe, _Record())

    @property
    def last_run(self) -> tuple[str, str, str] | None:
        """Implementations that forward, dgrad and wgrad took (in backward: will take) when the
        weight or a view of it was last multiplied or traced; None before. When weights share
        compiled code, the one that it was traced with has the record."""
        return self.record.last_run

    def plain(self) -> Tensor:
        """The high-precision tensor, sharing storage; the gradient passes through."""
        return _Plain.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        # Its own storage is empty: what reads it through a pointer must not get that.
        return self.original.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.original.__dlpack_device__()

    def share_memory_(self) -> Float8Weight:
        self.original.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.original.is_shared())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Float8Weight({self.original!r}, recipe={self.recipe.name}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # torch.compile compares this before it reuses code. Hence the assumed device, and no parts
        # of a weight that has changed, so that code is traced again, which is refused.
        names, of = ["original"], None
        if self.copies is not None and has_copies(self):
            copies = self.copies
            parts = () if copies.made.has_changed() else copies.parts
            names += [f"copy{i}" for i, part in enumerate(parts) if part is not None]
            names += ["total"] if parts and copies.total is not None else []
            of = len(parts), copies.matrix, copies.turned
        return names, (self.recipe, self.record, of, assumed_device())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> Float8Weight:
        recipe, record, of, _ = meta
        copies = None
        if of is not None:
            parts: Any = tuple(inner.get(f"copy{i}") for i in range(of[0]))
            copies = Copies(record.cached, parts, inner.get("total"), *of[1:])
        return _build(inner["original"], recipe, record, copies)

    def _stable_hash_for_caching(self) -> str:
        """All that compiled code depends on, for torch's cache of it on disk."""
        t, plans = self.original, self.recipe.plan(self.device)
        layout = (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, self.requires_grad)
        (_, *names), (_, _, of, _) = self.__tensor_flatten__()
        copied = [getattr(self, n)._stable_hash_for_caching() for n in names if n != "total"]
        total = self.total.dtype if "total" in names else None
        return repr(("Float8Weight", self.recipe, plans, layout, copied, total, of))

    def __deepcopy__(self, memo: Any) -> Any:
        copy: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        if isinstance(self, nn.Parameter):  # which is copied without its gradient
            copy.grad = None
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = self.requires_grad, isinstance(self, nn.Parameter)
        return _rebuild, (self.original, self.recipe, *kind, _attributes(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not (
            kwargs.get("materialize_grads") or any(_is_traced(t) for t in args[1])
        ):
            # A checkpoint may repeat products meanwhile, which are to be caught, so functions stay
            # enabled. Weights go in as edges of the graph, which do not lead back here.
            edge = torch.autograd.graph.get_gradient_edge
            return func(*_each(args, lambda t: edge(t) if isinstance(t, cls) else t), **kwargs)
        if func in _THROUGH_MEMORY:
            return func(*_each(args, _plain), **kwargs)
        product = _PRODUCTS.get(func)
        if product is None and isinstance(func, torch._ops.OpOverloadPacket):
            product = _FOREIGN.get(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if product is None:
                return func(*args, **kwargs)
            options = {"out"} if product is _grouped else {"out", "out_dtype"}
            if refused := kwargs.keys() & options:
                raise NotImplementedError(
                    f"{func.__name__} with a Float8Weight takes no {refused.pop()}=; use its result"
                )
            return product(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        if func is aten.copy_.default and all(isinstance(t, Float8Weight) for t in args[:2]):
            w, changed = args[:2]
            if w.original is changed.original and w.copies is not None and w.total is not None:
                # torch.compile's way to say that backward has added to a total, and to that alone.
                w.total.copy_(changed.total)
                return w
        if kind == "composite":  # under inference_mode these arrive whole
            return func.decompose(*args, **kwargs)
        weights: list[Float8Weight] = []

        def unwrap(t: Tensor) -> Tensor:
            if not isinstance(t, Float8Weight):
                return t
            weights.append(t)
            return t.original

        plain_args = _each(args, unwrap)
        plain_kwargs = {name: _each(value, unwrap) for name, value in kwargs.items()}
        w = weights[0]
        if kind in ("multiplies", "reshapes"):
            raise NotImplementedError(_refusal(func, kind, w))
        with _counting_versions() if kind == "views" and not w.is_inference() else nullcontext():
            out = func(*plain_args, **plain_kwargs)
        if kind == "writes":
            wrapper = {id(w.original): w for w in weights}
            _count_writes(func, plain_args, plain_kwargs, wrapper.keys())
            return _each(out, lambda t: wrapper.get(id(t), t))
        joined = args[0] if kind == "joins" else ()
        if kind == "other" or any(getattr(t, "recipe", None) != w.recipe for t in joined):
            return out
        with torch.inference_mode(w.is_inference()):  # autograd wants views to be as their base is
            of = _copies_of_view if kind == "views" and has_copies(w) else lambda w, t: None
            out = _each(out, lambda t: _like(w, t, of(w, t)) if _is_high_precision(t) else t)
        if kind == "views" and _is_traced(w):
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out

    # FSDP2 gathers the shards, padded to one size, in high precision, into a Float8Weight. Shards
    # along another dimension than the first come joined, but in the shape of joined rows.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], Any]:
        shard = self.original.to(mp_policy.param_dtype or self.dtype)
        if (missing := -(-outer_size[0] // mesh.size()) - shard.shape[0]) > 0:
            shard = torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])])
        return (shard,), outer_size

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        # Given ``out``, made here the first time, FSDP2 has gathered into its storage again.
        whole = gathered[0].view(-1, *metadata[1:])
        return None if out is not None else (_like(self, whole), gathered)


_JOINS = (aten.cat.default, aten.stack.default)
_COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten._pin_memory.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.empty_like.default,  # for to_empty; zeros_like, optimisers' states, is plain
    aten.new_empty.default,  # FSDP2's empty and padded shards
    aten.new_zeros.default,
)
# Methods that read or write memory themselves; a Float8Weight's own is empty.
_THROUGH_MEMORY = frozenset((
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.apply_, Tensor.map_, Tensor.__format__,
))  # fmt: skip
# An op with one of these words in its name multiplies matrices, or could.
_MULTIPLIES = frozenset(
    "mm addmm bmm addbmm baddbmm mv addmv dot vdot matmul linear trilinear rnn lstm gru attention "
    "transformer convolution conv conv1d conv2d conv3d".split()
)


def _counting_versions() -> Any:
    """In which views of a plain tensor count its versions as their own, below autograd too:
    backward then sees that a weight was changed whose view it was given."""
    key = torch._C.DispatchKey.ADInplaceOrView
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include, exclude.remove(key))


@functools.cache
def _kind(func: Any) -> str:
    """What an op is to a Float8Weight."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    if not _MULTIPLIES.isdisjoint(func._opname.split("_")):
        return "multiplies"
    if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
        return "reshapes"
    if func._schema.is_mutable:
        return "writes"
    if func.is_view and func is not aten.view.dtype:
        return "views"
    return "joins" if func in _JOINS else "copies" if func in _COPIES else "other"


def _refusal(func: Any, kind: str, w: Float8Weight) -> str:
    if kind == "reshapes":
        return f"{func._opname} reshapes a Float8Weight in place; take a view of it instead"
    return (
        f"{func._opname} does not multiply a Float8Weight (shape {tuple(w.shape)}, recipe "
        f"{w.recipe.name}) in FP8. What does: F.linear, @, matmul, mm, bmm, mv, addmm, baddbmm, "
        "grouped_mm, einsum of two; not in torch.func. Pass weight.plain() to multiply in high "
        "precision."
    )


def _each(t: Any, change: Callable[[Tensor], Any]) -> Any:
    """``t``, a nest of lists and tuples, with its tensors changed; quicker than pytree."""
    if isinstance(t, Tensor):
        return change(t)
    if isinstance(t, list | tuple):
        parts = [_each(part, change) for part in t]
        return parts if isinstance(t, list) else tuple(parts)
    return t


def _is_traced(t: Any) -> bool:
    return isinstance(t, Float8Weight) and isinstance(t.original, FunctionalTensor)


def _is_high_precision(t: Tensor) -> bool:
    # float64 too, so that model.double() works; multiplying it then raises.
    return t.dtype.is_floating_point and t.dtype.itemsize > 1


def _build(
    original: Tensor, recipe: Recipe, record: _Record, copies: Copies | None = None
) -> Float8Weight:
    place = original.shape, original.stride(), original.storage_offset()
    w: Float8Weight = torch.Tensor._make_wrapper_subclass(
        Float8Weight, *place, dtype=original.dtype, device=original.device
    )
    w.original, w.recipe, w.record, w.copies = original, recipe, record, copies
    return w


def _like(w: Float8Weight, inner: Tensor, copies: Copies | None = None) -> Float8Weight:
    return _build(inner, w.recipe, w.record, copies)


def _copies_of_view(w: Any, t: Tensor) -> Copies | None:
    """Of w's copies those of a view t of its original: of the whole or of one matrix, as it is or
    transposed; of others none."""
    copies: Copies = replace(w.copies)
    whole, lead = w.original, w.ndim - t.ndim
    have, of = (list(zip(x.shape, x.stride(), strict=True)) for x in (t, whole))
    if lead not in (0, 1) or t.ndim < 2:
        return None
    if have != of[lead:]:
        if have != [*of[lead:-2], of[-1], of[-2]]:
            return None
        copies.parts = tuple(copies.parts[i ^ 1] for i in range(len(copies.parts)))
        copies.turned = not copies.turned
    step = int(whole.stride(0))
    e, rest = divmod(int(t.storage_offset() - whole.storage_offset()), step or 1)
    if rest or not 0 <= e < (len(whole) if lead else 1):
        return None
    if lead:
        copies.parts = tuple(_matrix(part, e) for part in copies.parts)
        # A matrix of a stack whose matrices are one (stride 0) starts where the stack does: any of
        # them has its copies, but not its gradient.
        copies.total = copies.total if step else None
        copies.matrix = None if copies.total is None else e
    return copies


def _matrix(stack: Float8TrainingTensor | None, e: int) -> Float8TrainingTensor | None:
    if stack is None:
        return None
    return Float8TrainingTensor(stack.qdata[e], stack.scale[e], stack.block[1:], stack.dtype)


def _rebuild(
    original: Tensor,
    recipe: Recipe,
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
) -> Tensor:
    w = _build(original, recipe, _Record())
    p = nn.Parameter(w, requires_grad) if is_parameter else w.requires_grad_(requires_grad)
    p.__dict__.update(attributes)
    return p


def _attributes(w: Tensor) -> dict[str, Any]:
    """What others have hung on a weight."""
    ours = ("original", "recipe", "record", "copies", "_is_param")
    return {k: v for k, v in w.__dict__.items() if k not in ours}


def _count_writes(func: Any, args: Any, kwargs: Any, ids: Any) -> None:
    """Autograd may have saved a view of an original, whose version stands still below autograd, as
    do those of all that an op writes of a list, plain ones too (torch leaves them to its kernels).
    """
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            listed = isinstance(written, list | tuple)
            for t in written if listed else [written]:
                if (listed or id(t) in ids) and not t.is_inference():
                    torch.autograd.graph.increment_version(t)


class _Plain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Float8Weight) -> Tensor:
        return w.original.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Its presence lets functorch pass, so that what float8.linear says of it is heard."""
        ctx.set_materialize_grads(False)  # there is none where it has been added to a total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, recipe: Recipe, record: _Record) -> Tensor:
        w = Float8Weight(t, recipe)
        w.record = record
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


# ---------------------------------------------------------------------------------------- products


def _times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] x [N, K] -> [..., N], or [B, M, K] x [B, N, K] -> [B * M, N]."""
    if isinstance(x, Float8Weight):
        raise NotImplementedError(
            "both operands are Float8Weights, and an FP8 product has one; multiply .plain() of them"
        )
    assert isinstance(w, Float8Weight)
    if w.ndim == 2:
        plans = w.recipe.plan(x.device)
        return run_linear(x, w.plain(), bias, w.recipe, plans, begin(w, plans))
    if len(w) == 0 or isinstance(x, Float8TrainingTensor):
        return torch.bmm(x, w.plain().mT).flatten(0, 1)
    ends = torch.arange(1, len(w) + 1, dtype=torch.int32, device=x.device) * x.shape[1]
    return _times_groups(x.flatten(0, 1), w, ends)


def _times_groups(x_TK: Tensor, w_BNK: Any, offs: Tensor) -> Tensor:
    """Rows of x, which end where offs says, each with its matrix: [T, N]."""
    plans = grouped_plans(w_BNK.recipe, x_TK.device)
    w_BKN, copies = w_BNK.plain().mT, begin(w_BNK, plans)
    return run_grouped_mm(x_TK, w_BKN, offs, w_BNK.recipe, plans, copies)


def begin(w_NK: Any, plans: Plans) -> Cached:
    """Note who is going to multiply w, by these plans; its FP8 copies for forward and dgrad, if
    float8.cached_weights has made some of this view, a stack or a matrix of one."""
    note_run(w_NK.record, plans)
    if not has_copies(w_NK):
        return NOT_CACHED
    w_NK.copies.made.check(w_NK, w_NK.recipe)
    copies, total = w_NK.copies, w_NK.copies.total
    if total is not None:  # views that autograd knows, so that it sees what is added
        total = total if copies.matrix is None else total[copies.matrix]
        total = total.mT if copies.turned else total
    return copies.parts[0], copies.parts[-1], total


def has_copies(w: Any) -> bool:
    """Of the block of float8.cached_weights that is on, that is: a view may outlive its own."""
    return w.copies is not None and w.copies.made is w.record.cached


def _contract(
    equation: str, left: Tensor, right: Tensor, letters_broadcast: bool = False
) -> Tensor:
    """einsum, by sorting labels into batch (in x, w and the result), inner (in x and w), rows (x)
    and columns (w). Sizes of 1 broadcast in an ellipsis; einsum itself broadcasts all."""
    name = (
        f"{equation!r} of shapes {tuple(left.shape)} and {tuple(right.shape)} with a Float8Weight"
    )
    terms, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    x, in_x = left, _labels(first, left.ndim, name)
    w, in_w = right, _labels(second, right.ndim, name)
    every = [*in_x, *in_w]
    hidden = sorted({s for s in every if isinstance(s, int)})
    if arrow:
        head, ellipsis, tail = result.partition("...")
        out = [*head, *(hidden if ellipsis else ()), *tail]
    else:
        out = [*hidden, *sorted(s for s in every if isinstance(s, str) and every.count(s) == 1)]
    if len(set(out)) < len(out) or not set(out) <= set(every):
        raise ValueError(f"{name}: the result's labels must be distinct, and labels of operands")
    if not isinstance(w, Float8Weight):
        x, in_x, w, in_w = w, in_w, x, in_x

    for s in [s for s in in_w if s in in_x]:  # a size of 1 that broadcasts is not shared
        i, j = in_x.index(s), in_w.index(s)
        if x.shape[i] == w.shape[j]:
            continue
        if not (letters_broadcast or isinstance(s, int)) or 1 not in (x.shape[i], w.shape[j]):
            raise ValueError(f"{name}: {s!r} has sizes {x.shape[i]} and {w.shape[j]}")
        if x.shape[i] == 1:
            x, _ = x.squeeze(i), in_x.pop(i)
        else:
            w, _ = w.squeeze(j), in_w.pop(j)
    if summed := [i for i, s in enumerate(in_x) if s not in in_w and s not in out]:
        x, in_x = x.sum(summed), [s for i, s in enumerate(in_x) if i not in summed]

    inner = [s for s in in_w if s in in_x and s not in out]
    if not inner or any(s not in in_x and s not in out for s in in_w):
        raise NotImplementedError(
            f"{name} is no matrix product, which sums over labels of both operands and over no "
            "other label of the weight; use weight.plain()"
        )
    batch = [s for s in in_w if s in in_x and s in out]
    rows, columns = [s for s in in_x if s not in in_w], [s for s in in_w if s not in in_x]
    size = dict(zip([*in_x, *in_w], [*x.shape, *w.shape], strict=True))
    b, m, n, k = ([math.prod(size[s] for s in part)] for part in (batch, rows, columns, inner))
    b = b if batch else []
    x = x.permute([in_x.index(s) for s in batch + rows + inner]).reshape(b + m + k)
    w = w.permute([in_w.index(s) for s in batch + columns + inner]).reshape(b + n + k)
    have = batch + rows + columns
    y = _times(x, w).reshape([size[s] for s in have])
    return y if have == out else y.permute([have.index(s) for s in out])


def _labels(term: str, ndim: int, name: str) -> list[Any]:
    """A label for each dimension; those of an ellipsis are ..., -2, -1."""
    head, ellipsis, tail = term.partition("...")
    hidden = ndim - len(head) - len(tail)
    if hidden < 0 or (hidden > 0 and not ellipsis):
        raise ValueError(f"{name}: {term!r} does not label {ndim} dimensions")
    labels = [*head, *range(-hidden, 0), *tail]
    if len(set(labels)) < len(labels):
        raise NotImplementedError(f"{name} takes a diagonal, which is no matrix product")
    return labels


def _einsum(equation: str, *operands: Tensor) -> Tensor:
    if len(operands) != 2 or equation.count(",") != 1:
        raise NotImplementedError(
            f"einsum {equation!r} of {len(operands)} operands has a Float8Weight; contract in pairs"
        )
    return _contract(equation, *operands, letters_broadcast=True)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    if isinstance(other, Float8Weight) and other.ndim == 2 and input.ndim > 0:
        return _times(input, other.t())
    left, right = "...mk" if input.ndim > 1 else "k", "...kn" if other.ndim > 1 else "k"
    out = "..." + "m" * (input.ndim > 1) + "n" * (other.ndim > 1)
    return _contract(f"{left},{right}->{out}", input, other)


def _linear_form(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Float8Weight) and weight.ndim == 2:
        return _times(input, weight, _plain(bias))
    if not (isinstance(input, Float8Weight) or isinstance(weight, Float8Weight)):
        return F.linear(input, weight, _plain(bias))
    return _plus(_matmul(input, weight.t()), _plain(bias))


def _added(
    op: Any, equation: str, c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1
) -> Tensor:
    c = _plain(c)
    if not (isinstance(a, Float8Weight) or isinstance(b, Float8Weight)):
        return op(c, a, b, beta=beta, alpha=alpha)  # type: ignore[no-any-return]
    if a.ndim == b.ndim == 2 and c.shape == b.shape[1:] and beta == alpha == 1:
        return _linear_form(a, b.t(), c)
    y = _contract(equation, a, b)
    return _plus(y if alpha == 1 else y * alpha, None if beta == 0 else c, beta)


def _grouped(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, K] x [B, K, N] -> [T, N] by ``offs``; or, without it, of two stacks, bmm."""
    if isinstance(input, Float8Weight) or not isinstance(mat2, Float8Weight) or bias is not None:
        raise NotImplementedError(
            "grouped_mm takes one Float8Weight, its second operand, and no bias; add a bias to the "
            "result, or multiply weight.plain()"
        )
    if offs is None and input.ndim == mat2.ndim == 3:
        y = _contract("bmk,bkn->bmn", input, mat2)
    elif offs is None or (input.ndim, mat2.ndim) != (2, 3):
        raise ValueError(
            f"grouped_mm of shapes {tuple(input.shape)} and {tuple(mat2.shape)} with a "
            "Float8Weight: needed [T, K], [E, K, N] and offs=, int32 [E], with where the rows of "
            "each expert end; or, without offs, [E, M, K] and [E, K, N]"
        )
    else:
        y = _times_groups(input, mat2.mT, offs)
    if out_dtype not in (None, y.dtype):
        raise NotImplementedError(
            f"grouped_mm with a Float8Weight makes {y.dtype} here, and out_dtype={out_dtype} is "
            "asked for; use .to() of its result"
        )
    return y


def _plus(y: Tensor, c: Tensor | None, beta: float = 1) -> Tensor:
    """In the higher precision of the two, as float8.linear adds a bias; of y's dtype."""
    return y if c is None else torch.add(y, c, alpha=beta).to(y.dtype)


def _plain(t: Any) -> Any:
    return t.plain() if isinstance(t, Float8Weight) else t


def _set_data(w: Float8Weight, value: Tensor) -> None:
    """``w.data = value``"""
    value = _plain(value).detach()
    have, want = ((t.shape, t.stride(), t.dtype, t.device) for t in (value, w.original))
    if have != want:
        raise NotImplementedError(
            f"a Float8Weight's .data keeps its shape, strides, dtype and device: {want}, not {have}"
        )
    w.original, w.copies = value, None


_FORMS: dict[tuple[Any, ...], Callable[..., Any]] = {
    (Tensor.data.__set__,): _set_data,  # type: ignore[attr-defined]
    (F.linear,): _linear_form,
    (torch.einsum,): _einsum,
    (torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__): _matmul,
    (torch.mm, Tensor.mm): lambda input, mat2: _contract("mk,kn->mn", input, mat2),
    (torch.bmm, Tensor.bmm): lambda input, mat2: _contract("bmk,bkn->bmn", input, mat2),
    (torch.mv, Tensor.mv): lambda input, vec: _contract("mk,k->m", input, vec),
    (torch.addmm, Tensor.addmm): lambda input, mat1, mat2, **scales: _added(
        torch.addmm, "mk,kn->mn", input, mat1, mat2, **scales
    ),
    (torch.baddbmm, Tensor.baddbmm): lambda input, batch1, batch2, **scales: _added(
        torch.baddbmm, "bmk,bkn->bmn", input, batch1, batch2, **scales
    ),
    (torch._grouped_mm,): _grouped,  # what F.grouped_mm calls
}
_PRODUCTS = {spelling: form for spellings, form in _FORMS.items() for spelling in spellings}
# What transformers takes for F.grouped_mm of experts in compiled code, unless they are in bf16.
_FOREIGN = {"transformers.grouped_mm_fallback": _grouped}


# ----------------------------------------------------------------------------------------- modules


def wrap_parameter(module: nn.Module, name: str, recipe: Recipe = ROWWISE) -> None:
    """Make a parameter a ``Float8Weight``: the same object, in every module and optimiser with it.

    State dicts of ``module`` still hold a plain tensor that shares its storage, and load plain
    tensors. A plain tensor that stands in for it in a call of ``module``, as those do that
    ``torch.func.functional_call`` is given, multiplies as it would.

    Call it for every module that shares the parameter, before torch.compile and sharding.
    No graph may be waiting for its backward.

    Raises:
        ValueError: there is no such parameter, it is no plain high-precision matrix, has hooks
            (register them afterwards), or is a Float8Weight of another recipe.
    """
    p = module._parameters.get(name)
    if p is None:
        has = ", ".join(module._parameters)
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}; it has {has}")
    if not isinstance(p, Float8Weight):
        if p.ndim < 2:
            raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} is no matrix")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"parameter {name!r} has hooks; register them after wrap_parameter")
        with torch.inference_mode(False):
            weight = Float8Weight(p, recipe)
        _swap(p, weight)
    elif p.recipe != recipe:
        raise ValueError(f"parameter {name!r} has recipe {p.recipe.name}; unwrap_parameter first")
    given = _given(module)
    if given is None:
        given = _Given()
        given.hooks = [
            module.register_state_dict_post_hook(_plain_state),
            module.register_load_state_dict_pre_hook(_wrap_state),
            module.register_forward_pre_hook(given.wrap),
            module.register_forward_hook(given.give_back, always_call=True),
        ]
    assert isinstance(p, Float8Weight)
    given.weights[name] = recipe, p.record


def unwrap_parameter(module: nn.Module, name: str) -> None:
    """Undo ``wrap_parameter``: the same object is a plain ``nn.Parameter`` again.

    Raises:
        ValueError: ``wrap_parameter`` has not been called for it.
    """
    p, given = module._parameters.get(name), _given(module)
    if p is None or given is None:
        raise ValueError(f"{type(module).__name__} has no {name!r} that wrap_parameter has made")
    if isinstance(p, Float8Weight):  # else another module that shares it was first
        _swap(p, p.original)
    elif is_traceable_wrapper_subclass(p):
        raise ValueError(f"parameter {name!r} is sharded; call unwrap_parameter before sharding it")
    given.weights.pop(name, None)
    for hook in () if given.weights else given.hooks:
        hook.remove()


class _Given:
    """Plain tensors that stand in for Float8Weights during one forward of a module, as those that
    torch.func.functional_call is given: they multiply as the weights would."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[Recipe, _Record]] = {}
        self.given: list[dict[str, Any]] = []  # of each call that has begun
        self.hooks: list[RemovableHandle] = []

    def wrap(self, module: nn.Module, args: Any) -> None:
        given: dict[str, Any] = {}
        for name, (recipe, record) in self.weights.items():
            p = module._parameters.get(name)
            if isinstance(p, Float8Weight) or p is None or is_traceable_wrapper_subclass(p):
                continue  # that of a DTensor has a Float8Weight inside, or another's shards
            refuse_functorch("a module with a Float8Weight", "float8.revert(model) first")
            given[name] = p
            module._parameters[name] = _Weight.apply(p, recipe, record)  # type: ignore[no-untyped-call]
        if given or self.given:
            self.given.append(given)

    def give_back(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.given:
            module._parameters.update(self.given.pop())


# torch.compile runs the hooks of the module that it is called with outside of its graph, each as
# one of its own unless it is told not to; hooks of modules inside become part of theirs as ever.
# After a graph break it takes views of weights anew, and a graph of that would take them anew too.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_torch_function: Any = Float8Weight.__torch_function__
for _outside in (_Given.wrap, _Given.give_back, _torch_function.__func__):
    eval_frame.set_code_exec_strategy(_outside.__code__, _SKIP)


def _given(module: nn.Module) -> _Given | None:
    """What ``wrap_parameter`` has hung on a module."""
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((given for given in hooks if isinstance(given, _Given)), None)


def given_as(module: nn.Module, name: str) -> tuple[Recipe, _Record] | None:
    """By what a plain parameter that took a wrapped one's place multiplies; None where none did."""
    given = _given(module) if module._parameters.get(name) is not None else None
    return None if given is None else given.weights.get(name)


@torch.inference_mode(False)  # an inference tensor would be frozen for good, without a word
def _swap(p: nn.Parameter, content: Tensor) -> None:
    new = nn.Parameter(content, p.requires_grad)
    new.grad = p.grad
    new.__dict__.update(_attributes(p))
    torch.utils.swap_tensors(p, new)


def _plain_state(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    for key in (prefix + name for name in module._parameters):
        if (value := state_dict.get(key)) is not None:
            state_dict[key] = _change(value, value, lambda t, _: _plain(t))


def _wrap_state(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *_: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers"):  # values take the parameters' places
        for name, p in module._parameters.items():
            if (value := state_dict.get(key := prefix + name)) is not None:
                state_dict[key] = _change(value, p, lambda t, w: _like(w, _plain(t).detach()))


def _change(value: Any, like: Any, change: Callable[[Any, Any], Any]) -> Any:
    """``change(value, like)`` where ``like``, or the local part of a DTensor, is a Float8Weight."""
    if isinstance(like, Float8Weight):
        return change(value, like)
    if type(value) is type(like) and is_traceable_wrapper_subclass(like):
        names, meta = value.__tensor_flatten__()
        if any(isinstance(getattr(like, name), Float8Weight) for name in names):
            parts = {n: _change(getattr(value, n), getattr(like, n), change) for n in names}
            return type(value).__tensor_unflatten__(parts, meta, value.size(), value.stride())
    return value


# torch.load(weights_only=True) reads a pickled Float8Weight with these; state dicts hold none.
torch.serialization.add_safe_globals([Float8Weight, _rebuild, Recipe, Gemm, Cast])
