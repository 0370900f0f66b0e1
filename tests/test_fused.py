"""Casts fused with what makes their input: the ops, and their Triton kernels.

Where a producer's arithmetic is exact, kernels and reference agree byte for byte; elsewhere the
last bit of an exponential or a root may differ, and the tests say by how much. The kernels run on a
GPU where there is one, elsewhere in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from recorders import machine_code, specialisations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8  # noqa: F401 (registers the ops)
from float8.devices import describe
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from float8.kernels import fused
from float8.kernels.quantize import TRITON_BLOCKS, CastPlan
from float8.scaling import FULL
from float8.testing import assert_same_bytes, deterministic, needs, relative_error, targets

ops = torch.ops.float8
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = (E4M3FN, E5M2) if GPU else (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
MODES = ("fp32", "fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil")
PAIRS = [p for p in itertools.product((None, *TRITON_BLOCKS), repeat=2) if p != (None, None)]
# Odd beside round, one beside several, more than a tile in either direction.
SHAPES = [(1, 1), (5, 3), (4, 16), (129, 130), (36, 300), (128, 256), (130, 7)]
SOURCES = ["rms", "swiglu", "swiglu_backward"]
source = pytest.mark.parametrize("source", SOURCES)
triton = pytest.mark.skipif(
    None in (importlib.util.find_spec("triton"), importlib.util.find_spec("numpy")),
    reason="needs triton and numpy",
)
# numpy's, in the interpreter: e^-x of a very negative x, Inf * 0
quiet = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)
ROWS = CastPlan((1, FULL), E4M3FN.dtype, "fp32")


def arguments(row: CastPlan | None, col: CastPlan | None) -> tuple[Any, ...]:
    return (*(row or (None,) * 3), *(col or (None,) * 3))


def kernels(
    source: str, inputs: list[Tensor | None], eps: float, row: CastPlan | None, col: CastPlan | None
) -> list[Tensor | None]:
    """What the Triton kernels make of the inputs of an op, in the op's order, rstd last."""
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels.fused_triton import fused_layouts

    if source == "swiglu_backward":
        grad, gate, up = inputs
        inputs = [gate, up, grad]
    x, y, z = (*inputs, None)[:3]
    assert x is not None
    with deterministic():  # what nobody writes is NaN
        rstd, layouts = fused_layouts(source, x, y, z, eps, row, col)
    return [*layouts, rstd]


def reference(
    source: str, inputs: list[Tensor | None], eps: float, row: CastPlan | None, col: CastPlan | None
) -> list[Tensor]:
    function = getattr(
        fused, f"{source}_norm_quantize" if source == "rms" else f"{source}_quantize"
    )
    return list(function(*inputs, *([eps] if source == "rms" else []), *arguments(row, col)))


def layouts(outputs: list[Any]) -> list[Tensor]:
    """Those that were asked for."""
    return [t for t in outputs[:4] if t is not None and t.numel()]


def plan(block: tuple[int, int] | None, rng: random.Random) -> CastPlan | None:
    if block is None:
        return None
    mode = rng.choice(MODES[3:]) if block == (1, 32) else rng.choice(MODES)
    return CastPlan(block, rng.choice(FORMATS).dtype, mode)


def stride(x: Tensor, rng: random.Random) -> Tensor:
    """The same values with other strides."""
    kind = rng.choice(["contiguous", "transposed", "every other column", "half of a wider tensor"])
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "every other column":
        return torch.stack([x, x], -1)[..., 0]
    return torch.cat([x, x], 1)[:, x.shape[1] :] if kind != "contiguous" else x


def blemish(x: Tensor, rng: random.Random) -> None:
    kind = rng.choice(["none", "nan", "inf", "zero row", "negative zero column"])
    if kind in ("nan", "inf"):
        x.view(-1)[rng.randrange(x.numel())] = math.nan if kind == "nan" else -math.inf
    elif kind == "zero row":
        x[rng.randrange(x.shape[0])] = 0
    elif kind == "negative zero column":
        x[:, rng.randrange(x.shape[1])] = -0.0


def pick(shape: tuple[int, ...], values: list[float]) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape)]


def exact(source: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor | None]:
    """Inputs of an op whose roots and sigmoids are powers of two."""
    m, k = shape
    if source == "rms":
        # The mean of the squares of these eight is 4.
        eight = torch.tensor([5.0, 2, 1, 1, 1, 0, 0, 0]) if k % 8 == 0 else torch.full((1,), 2.0)
        x = eight.repeat(m, k // len(eight))
        x = torch.stack([row[torch.randperm(k)] for row in x]) * pick(shape, [-1, 1])
        x *= torch.exp2(torch.randint(-6, 6, (m, 1)).float())
        weight = pick((k,), [-0.5, 1, 2, 8]) if random.random() < 0.8 else None
        return [x.to(dtype), None if weight is None else weight.to(dtype)]
    gate = pick(shape, [0, -0.0, 20, 64, 100, -128, -1000, 37, 256])
    others = [torch.randn(shape) * torch.exp2(torch.randint(-12, 5, (m, 1)).float())]
    others += [torch.randn(shape)] if source == "swiglu_backward" else []
    up, *grad = [t.to(dtype) for t in others]
    return [*grad, gate.to(dtype), up]


def truth(source: str, inputs: list[Tensor | None], eps: float) -> Tensor:
    """In float64, gradients by autograd."""
    x, *rest = (None if t is None else t.double() for t in inputs)
    assert x is not None
    if source == "rms":
        return torch.nn.functional.rms_norm(x, x.shape[1:], rest[0], eps)
    if source == "swiglu":
        assert rest[0] is not None
        return torch.nn.functional.silu(x) * rest[0]
    gate, up = (t.requires_grad_() for t in rest if t is not None)
    return torch.stack(
        torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), grad_outputs=x)
    )


def values(outputs: list[Any], row: CastPlan | None, col: CastPlan | None) -> list[Tensor]:
    """Both layouts as the producer's result, dequantised."""
    found = []
    for i, cast in enumerate((row, col)):
        if cast is not None:
            data, scale = outputs[2 * i : 2 * i + 2]
            block = (*(1,) * (data.ndim - 2), *cast.block)
            back = ops.dequantize(data, scale, block, torch.float32)
            found.append(back.mT if i else back)
    return found


# ------------------------------------------------------------------------------ kernels, reference


@triton
@quiet
@source
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_inputs_give_the_bytes_of_the_reference(source: str, shape: tuple[int, int]) -> None:
    """Every pair of blocks, over the shapes of a source; formats, modes, dtypes, strides, and what
    is not finite, by chance."""
    rng = random.Random(f"{source} {shape}")
    random.seed(rng.random())
    torch.manual_seed(rng.randrange(1000))
    pairs = PAIRS if GPU else random.Random(source).sample(PAIRS, len(PAIRS))
    for row_block, col_block in pairs if GPU else pairs[SHAPES.index(shape) :: len(SHAPES)]:
        dtype, row, col = rng.choice(DTYPES), plan(row_block, rng), plan(col_block, rng)
        inputs = exact(source, shape, dtype)
        assert inputs[0] is not None
        blemish(inputs[0], rng)
        inputs = [
            t if t is None else stride(t.to(DEVICE), rng) if t.ndim == 2 else t.to(DEVICE)
            for t in inputs
        ]
        got, expected = (f(source, inputs, 0.0, row, col) for f in (kernels, reference))
        try:
            for ours, theirs in zip(layouts(got), layouts(expected), strict=True):
                assert_same_bytes(ours, theirs)
                assert ours.stride() == theirs.stride()
            if source == "rms":
                assert got[4] is not None
                assert_same_bytes(got[4], expected[4])
        except AssertionError as error:
            raise AssertionError(f"{row} {col} {dtype} {inputs[0].stride()}: {error}") from error


@triton
@quiet
@source
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=str)
def test_random_inputs_are_cast_as_well_as_by_the_reference(
    source: str, block: tuple[int, int]
) -> None:
    """At least 99% of the bytes are equal, and scales within one step of the inputs' dtype (a few
    of float32's, in which exponentials and roots are taken)."""
    shape, eps, cast = (130, 200), 1e-5, CastPlan(block, E4M3FN.dtype, "fp32")
    for dtype in DTYPES if GPU else [random.Random(f"{source} {block}").choice(DTYPES)]:
        inputs: list[Tensor | None] = [torch.randn(shape) * 4 for _ in range(3)]
        inputs = [inputs[0], torch.randn(shape[1])] if source == "rms" else inputs
        inputs = [t.to(DEVICE, dtype) for t in inputs[: 2 + (source == "swiglu_backward")]]  # type: ignore[union-attr]
        exact_values, step = truth(source, inputs, eps), max(torch.finfo(dtype).eps, 1e-6)
        got, expected = (f(source, inputs, eps, cast, cast) for f in (kernels, reference))
        for ours, theirs in zip(values(got, cast, cast), values(expected, cast, cast), strict=True):
            error = relative_error(ours, exact_values)
            assert 1e-3 < error <= 1.02 * relative_error(theirs, exact_values)
        for i in (0, 2):
            data, scale = layouts(got)[i : i + 2]
            same = data.view(torch.uint8) == expected[i].view(torch.uint8)
            assert same.float().mean() >= 0.99
            assert ((scale - expected[i + 1]).abs() <= step * expected[i + 1]).all()
        if source == "rms":
            torch.testing.assert_close(got[4], expected[4], rtol=1e-6, atol=0)


@triton
@quiet
@source
def test_rows_longer_than_a_program_holds(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if that were 128 columns; then amaxes are taken in pieces, and torch takes the norms."""
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels import fused_triton

    monkeypatch.setattr(fused_triton, "MAX_ROW", 128)
    monkeypatch.setattr(fused_triton, "_CHUNK", 128)
    fused_triton._prepared.cache_clear()
    inputs = [t if t is None else t.to(DEVICE) for t in exact(source, (3, 300), torch.bfloat16)]
    tensor = ROWS._replace(block=(FULL, FULL))
    for row, col in ((ROWS, None), (tensor, ROWS), (None, tensor), (ROWS, ROWS), (ROWS, tensor)):
        got, expected = (f(source, inputs, 0.0, row, col) for f in (kernels, reference))
        for ours, theirs in zip(layouts(got), layouts(expected), strict=True):
            assert_same_bytes(ours, theirs)
    fused_triton._prepared.cache_clear()


@pytest.mark.skipif(not GPU, reason="takes minutes in Triton's interpreter")
@source
@pytest.mark.parametrize("columns", [14336, 16400])
def test_long_rows(source: str, columns: int) -> None:
    inputs = [
        t if t is None else t.to(DEVICE) for t in exact(source, (300, columns), torch.bfloat16)
    ]
    for row, col in itertools.product((None, ROWS, ROWS._replace(block=(FULL, FULL))), repeat=2):
        if row is not None or col is not None:
            got, expected = (f(source, inputs, 0.0, row, col) for f in (kernels, reference))
            for ours, theirs in zip(layouts(got), layouts(expected), strict=True):
                assert_same_bytes(ours, theirs)


@triton
@source
def test_a_new_number_of_tokens_compiles_nothing(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of plain casts: two variants of the kernel that knows whole tiles of rows."""
    from float8.kernels import fused_triton, launch, quantize_triton

    monkeypatch.setattr(fused_triton, "_prepared", fused_triton._prepared.__wrapped__)
    for module in (fused_triton, quantize_triton):  # as on an H200
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for module in (fused_triton, launch):
        monkeypatch.setattr(module, "runs_ptx", lambda device: True)
    run: set[str] = set()
    for row_block, col_block in PAIRS:
        row, col = (b and ROWS._replace(block=b) for b in (row_block, col_block))
        with monkeypatch.context() as patch:
            seen = specialisations(patch, fused_triton, ("tile_kernel", "row_kernel"))
            seen |= specialisations(patch, quantize_triton, ("column_kernel",))
            for tokens in (1, 2, 3, 4, 16, 17, 127, 128, 129, 1000, 2048, 4100, 8192, 8208):
                x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
                y, z = (x[0], None) if source == "rms" else (x, x if source != "swiglu" else None)
                fused_triton.fused_layouts(source, x, y, z, 1e-5, row, col)
        run |= {name for name in seen if seen[name]}
        for name, keys in seen.items():
            assert len(keys) <= (2 if name == "tile_kernel" else 1), (name, row, col, keys)
    assert run == {"tile_kernel", "row_kernel", "column_kernel"}


@triton
@quiet
@pytest.mark.parametrize(
    "cast",
    [CastPlan((1, 128), E4M3FN.dtype, "fp32"), CastPlan((1, 32), E4M3FN.dtype, "e8m0_rceil")],
)
def test_programs_that_stay(cast: CastPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles of SwiGLU than programs, which the interpreter has but two of."""
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels import fused_triton

    if not GPU:
        two = fused_triton._Stream(1, {"num_warps": 4})
        monkeypatch.setattr(fused_triton, "_stream", lambda *job: two)
        fused_triton._prepared.cache_clear()
    inputs = exact("swiglu", (2048, 4224) if GPU else (256, 256), torch.bfloat16)
    inputs = [t if t is None else t.to(DEVICE) for t in inputs]
    got, expected = (f("swiglu", inputs, 0.0, cast, cast) for f in (kernels, reference))
    for ours, theirs in zip(layouts(got), layouts(expected), strict=True):
        assert_same_bytes(ours, theirs)
    fused_triton._prepared.cache_clear()


@triton
@quiet
def test_halves_of_one_tensor_and_a_gradient_that_is_expanded() -> None:
    """What a projection to gate and up gives, and what the gradient of a sum is."""
    gate, up = exact("swiglu", (70, 136), torch.bfloat16)
    assert gate is not None and up is not None
    both = torch.cat([gate, up], 1).to(DEVICE)
    gate, up = both.chunk(2, dim=1)
    grad = torch.full((1, 1), 0.5, dtype=torch.bfloat16, device=DEVICE).expand(70, 136)
    for block in ((1, 128), (1, FULL)):
        cast = CastPlan(block, E4M3FN.dtype, "fp32")
        for source, inputs in {
            "swiglu": [gate, up],
            "swiglu_backward": [grad, gate, up],
        }.items():
            got = kernels(source, [*inputs], 0.0, cast, cast)
            packed = [t.contiguous() for t in inputs]
            for ours, theirs in zip(
                layouts(got), layouts(reference(source, [*packed], 0.0, cast, cast)), strict=True
            ):
                assert_same_bytes(ours, theirs)


@triton
@quiet
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, FULL)], ids=str)
def test_a_bad_value_stays_in_its_block(block: tuple[int, int], bad: float) -> None:
    """Of the gate, among gates of 64: in both layouts of both gradients."""
    gate, at = torch.full((130, 140), 64.0), (129, 131)
    gate[at] = bad
    up, grad = torch.randn(130, 140).exp(), torch.randn(130, 140).exp()
    inputs = [t.to(DEVICE, torch.bfloat16) for t in (grad, gate, up)]
    cast = CastPlan(block, E4M3FN.dtype, "fp32")
    data, scale, data_t, scale_t = kernels("swiglu_backward", [*inputs], 0.0, cast, cast)[:4]
    for layout, scales, (r, c) in ((data, scale, at), (data_t, scale_t, at[::-1])):
        assert layout is not None and scales is not None
        inner = 0 if block[1] == FULL else c // block[1]
        assert scales[:, r // block[0], inner].isnan().all()
        assert scales.isnan().sum() == 2
        assert layout[:, r, c].float().eq(0).all()


@triton
def test_the_sigmoid_of_the_kernels() -> None:
    """As their PTX computes it, here with correctly rounded steps, but for results below the
    smallest normal number, which the hardware's approximations flush to zero."""
    np = pytest.importorskip("numpy")
    x = np.concatenate([np.linspace(-110, 110, 400_001), [-1e30, 1e30, -0.0, 0.0]])
    x = x.astype(np.float32)
    log2e, quarter = np.float32(1.4426950216293335), np.float32(0.25)
    flush = lambda v: np.where(np.abs(v) < 2.0**-126, np.float32(0), v)  # noqa: E731
    with np.errstate(all="ignore"):
        # float64 holds the product; the sum rounds once, as a fused multiply-add does
        t = (x.astype(np.float64) * -float(log2e) - 2).astype(np.float32)
        t = flush(np.exp2(t.astype(np.float64)).astype(np.float32)) + quarter
        s = flush((1 / t.astype(np.float64)).astype(np.float32)) * quarter
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    ordinary = x > -88.5  # below, float32 has no e^-x
    error = np.abs(s[ordinary] - exact[ordinary]) / np.maximum(exact[ordinary], 2.0**-126)
    assert error.max() < 1e-5
    assert error[np.abs(x[ordinary]) < 16].max() < 2e-6
    assert (s[x < -90] == 0).all() and (s[x > 18] == 1).all() and (s[x == 0] == 0.5).all()


@pytest.mark.parametrize("target", targets("fused"))
@triton
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: wide accesses, hardware conversions, nothing in scratch,
    no fence around the atomics."""
    found = machine_code("cross_compile.py", "--fused", target)
    assert {k["kernel"] for k in found} == {"tile_kernel", "row_kernel", "column_kernel"}
    for kernel in found:
        assert kernel["scratch"] == 0, kernel
        # As of plain casts, three programs a multiprocessor are worth a few values put aside.
        allowed = 0 if kernel["of"] == "swiglu_backward" else 16
        assert kernel["spills"] <= allowed, kernel
        assert kernel["stack_pointer_reads"] == 0, kernel
        assert kernel["fences"] == 0, kernel
        amd = target.startswith("gfx")
        assert kernel["shared"] <= (64 << 10 if amd else describe(target).shared_memory), kernel
        # All but the loads and stores of scales, amaxes, norms and weights.
        assert kernel["wide_loads"] >= (0.45 if kernel["of"] == "rms" else 0.6) * kernel["loads"]
        if kernel["kernel"] == "tile_kernel":
            assert kernel["conversions"] >= 8, kernel
            if kernel["kind"] != "mx":
                assert kernel["wide_stores"] >= 0.6 * kernel["stores"], kernel


# --------------------------------------------------------------------------------------- the ops


def calls(device: str = "cpu") -> list[tuple[Any, tuple[Any, ...]]]:
    """(op, arguments): each op with both layouts and with either alone."""
    blocks = CastPlan((1, 128), E5M2.dtype, "pow2")
    square = CastPlan((128, 128), E4M3FN.dtype, "e8m0_floor")
    found: list[tuple[Any, tuple[Any, ...]]] = []
    for (row, col), dtype, (m, k) in [
        ((ROWS, blocks), torch.bfloat16, (5, 7)),
        ((None, square), torch.float32, (130, 33)),
        ((blocks, None), torch.float16, (3, 257)),
        ((square, ROWS), torch.bfloat16, (0, 64)),
    ]:
        x, y, z = (torch.randn(m, k, device=device, dtype=dtype) for _ in range(3))
        both = torch.randn(m, 2 * k, device=device, dtype=dtype)
        halves = both.chunk(2, 1) if m else (x, y)
        cast = arguments(row, col)
        weight = torch.randn(k, device=device) if col is not None else None
        found += [
            (ops.rms_norm_quantize.default, (x, weight, 1e-6, *cast)),
            (ops.swiglu_quantize.default, (*halves, *cast)),
            (ops.swiglu_backward_quantize.default, (x, y.t().contiguous().t(), z, *cast)),
        ]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(12))
def test_opcheck(index: int, device: str) -> None:
    """Schema, fake kernel, and tracing with dynamic shapes."""
    op, args = calls(device)[index]
    torch.library.opcheck(op, args)


def facts(tensors: Any) -> list[object]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(12))
def test_fake_and_meta_tensors_have_the_real_shapes_and_strides(index: int, device: str) -> None:
    op, args = calls(device)[index]
    real = op(*args)
    meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    assert facts(meta) == facts(real) and all(t.device.type == "meta" for t in meta)
    with FakeTensorMode() as fake:
        fakes = op(*(fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    assert facts(fakes) == facts(real)
    assert all(t.device == args[0].device for t in fakes)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_ops_give_eager_bytes_for_any_size(device: str) -> None:
    def chain(x: Tensor, weight: Tensor) -> list[Tensor]:
        cast = arguments(ROWS, CastPlan((1, 128), E4M3FN.dtype, "fp32"))
        gate, up = (x * 2).chunk(2, 1)
        return [
            *ops.rms_norm_quantize(x + 1, weight, 1e-6, *cast),
            *ops.swiglu_quantize(gate, up, *cast),
            *ops.swiglu_backward_quantize(up - 1, gate, up, *arguments(None, ROWS)),
        ]

    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, columns in [(130, 260), (257, 300)]:
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        weight = torch.randn(columns, device=device)
        for ours, eager in zip(compiled(x, weight), chain(x, weight), strict=True):
            assert_same_bytes(ours, eager)
            assert ours.stride() == eager.stride()


@pytest.mark.parametrize("device", DEVICES)
@source
def test_layouts_are_those_of_a_cast_after_the_producer(source: str, device: str) -> None:
    """Of each gradient by itself in the backward; a layout alone is the same as one of two."""
    m, k = 40, 300
    inputs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(3)]
    row, col = CastPlan((1, 128), E4M3FN.dtype, "fp32"), ROWS
    if source == "rms":
        name, args, results = "rms_norm", [inputs[0], inputs[1][0].float(), 1e-6], 1
        y = [inputs[0].float() * fused.inverse_rms(inputs[0], 1e-6)[:, None] * args[1]]
    elif source == "swiglu":
        name, args, results = source, inputs[:2], 1
        y = [torch.nn.functional.silu(inputs[0].float()) * inputs[1].float()]
    else:
        name, args, results = source, inputs, 2
        grad, gate, up = (t.float() for t in inputs)
        s = gate.sigmoid()
        y = [grad * up * s * (1 + gate * (1 - s)), grad * gate * s]
    op = getattr(ops, f"{name}_quantize")
    outputs = op(*args, *arguments(row, col))[:4]
    for i in range(results):
        expected = ops.quantize_dual(y[i].bfloat16(), *row, *col)
        for ours, theirs in zip(outputs, expected, strict=True):
            part = ours if results == 1 else ours[i]
            if device == "cpu":
                assert_same_bytes(part, theirs)
            assert part.stride() == theirs.stride()
            assert part.is_contiguous() or part.dtype == torch.float32
    alone = [*op(*args, *arguments(row, None))[:2], *op(*args, *arguments(None, col))[2:4]]
    for ours, theirs in zip(alone, outputs, strict=True):
        assert_same_bytes(ours, theirs)
    left_out = op(*args, *arguments(row, None))[2:4]
    assert [t.numel() for t in left_out] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_nothing(shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device)
    weight = torch.randn(shape[1], device=device)
    cast = arguments(ROWS, ROWS)
    data, scale, data_t, scale_t, rstd = ops.rms_norm_quantize(x, weight, 1e-6, *cast)
    assert (data.shape, data_t.shape, rstd.shape) == (shape, shape[::-1], shape[:1])
    assert (scale.shape, scale_t.shape) == ((shape[0], 1), (shape[1], 1))
    data, scale, *_ = ops.swiglu_backward_quantize(x, x, x, *cast)
    assert (data.shape, scale.shape) == ((2, *shape), (2, shape[0], 1))


def test_no_gradient_flows() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    outputs = [
        *ops.rms_norm_quantize(x, weight, 1e-6, *arguments(ROWS, ROWS)),
        *ops.swiglu_quantize(x, x, *arguments(ROWS, ROWS)),
    ]
    for t in outputs:
        assert t.grad_fn is None or "NotImplemented" in str(t.grad_fn.name())


def test_ops_refuse_what_they_do_not_take() -> None:
    """In words, for real and for fake tensors alike."""
    x, w = torch.randn(4, 6), torch.randn(6)
    e4m3, both = E4M3FN.dtype, arguments(ROWS, ROWS)
    norm, swiglu, backward = (
        ops.rms_norm_quantize,
        ops.swiglu_quantize,
        ops.swiglu_backward_quantize,
    )
    refused: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (norm, (x, w, 1e-6, *arguments(None, None))),
        (swiglu, (x, x, *arguments(None, None))),
        (norm, (x, w, 1e-6, (1, FULL), None, "fp32", *ROWS)),
        (backward, (x, x, x, *ROWS, None, None, "fp32")),
        (norm, (x[None], w, 1e-6, *both)),
        (swiglu, (x[0], x[0], *both)),
        (norm, (x.double(), w, 1e-6, *both)),
        (norm, (x, w[1:], 1e-6, *both)),
        (norm, (x, w.double(), 1e-6, *both)),
        (swiglu, (x, x.bfloat16(), *both)),
        (backward, (x[:2], x, x, *both)),
        (swiglu, (x, x, (1, 1, FULL), e4m3, "fp32", *ROWS)),
        (swiglu, (x, x, (1, FULL), E8M0.dtype, "fp32", *ROWS)),
        (swiglu, (x, x, *ROWS, (1, FULL), e4m3, "exact")),
    ]
    messages = []
    for op, args in refused:
        with pytest.raises(ValueError) as error:
            op(*args)
        messages.append(str(error.value))
        with pytest.raises(ValueError) as of_meta:
            op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        assert str(of_meta.value) == messages[-1]
    with pytest.raises(ValueError) as error:
        swiglu(x, x.to("meta"), *both)
    messages.append(str(error.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
no layout is asked for; give block, dtype and scale_mode of the result, of its transpose, or of both
no layout is asked for; give block, dtype and scale_mode of the result, of its transpose, or of both
block=[1, -1], dtype=None, scale_mode='fp32': a layout takes all three, or three Nones to be left out
block=None, dtype=None, scale_mode='fp32': a layout takes all three, or three Nones to be left out
the input has shape (1, 4, 6); a fused cast takes matrices [M, K], so flatten leading dimensions into M
the input has shape (6,); a fused cast takes matrices [M, K], so flatten leading dimensions into M
x is torch.float64; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
weight is torch.float32 of shape (5,); x of shape (4, 6) needs (6,) of torch.bfloat16, torch.float16, torch.float32
weight is torch.float64 of shape (6,); x of shape (4, 6) needs (6,) of torch.bfloat16, torch.float16, torch.float32
inputs differ: gate torch.float32 (4, 6), up torch.bfloat16 (4, 6); bring them to one shape and dtype
inputs differ: grad torch.float32 (2, 6), gate torch.float32 (4, 6), up torch.float32 (4, 6); bring them to one shape and dtype
block (1, 1, FULL) has 3 entries but the tensor of shape (4, 6) has 2 dimensions; give one entry per dimension (a size, or float8.FULL)
dtype=torch.float8_e8m0fnu is a format for scales only; use an e4m3 or e5m2 dtype
scale_mode 'exact' is unknown; choose one of fp32, pow2, e8m0_floor, e8m0_even, e8m0_ceil, e8m0_rceil
operands are on cpu and meta; move them to one device""",  # noqa: E501
    )
