"""The Triton kernel of the scaled matrix product: as exact as the reference, nothing is read beside
its operands; and its machine code.

Where there is a GPU it runs there; elsewhere in Triton's interpreter, as each architecture would
have it. Shape letters: M rows of a, N columns of b, K the contraction.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorders import machine_code
from test_matmul import (
    FN,
    FNUZ,
    NATIVE,
    ODD,
    OUT_DTYPES,
    REWRITES,
    Blocks,
    Matrix,
    assert_product,
    integers,
    operands,
    pair,
    tiny,
    values,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8
from float8 import E4M3FN, E8M0, FULL
from float8.devices import DeviceProfile, describe
from float8.formats import FORMATS
from float8.kernels import matmul
from float8.kernels.launch import Launch
from float8.scaling import decode_scale
from float8.testing import assert_same_bytes, needs, relative_error, targets

pytest.importorskip("triton")
np = pytest.importorskip("numpy")
GPU = torch.cuda.is_available()
if GPU and "convert" not in float8.device_profile("cuda").native:
    pytest.skip("this GPU has no FP8 instructions", allow_module_level=True)
if not GPU:
    import interpreter  # noqa: F401
    import triton.language as tl
    import triton.runtime.interpreter as triton_interpreter

    FLOATS = {
        getattr(tl, fmt.triton): torch.arange(256).to(torch.uint8).view(fmt.dtype).float().numpy()
        for fmt in FORMATS
        if fmt is not E8M0
    }
from float8.kernels import matmul_triton  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
# By descriptors; promoted, by pointers; in FNUZ; with scales in the matrix instructions.
ARCHS = ["here"] if GPU else ["sm_90", "sm_89", "gfx942", "sm_100"]
LARGE: Blocks = ((64, 128), (128, 64), "fp32")  # as tall as a tile, half as wide
MODES = {
    name: blocks
    for name, blocks in (NATIVE | ODD | {"64x128 x 64x128": LARGE}).items()
    if matmul.triton_refusal(describe("sm_90"), *pair(blocks)) is None
}
# One architecture for each mode, since the interpreter takes 10 ms a tile.
CASES = [(name, ARCHS[i % len(ARCHS)]) for i, name in enumerate(MODES)] + [("mx", ARCHS[-1])]
SIZES = (1, 15, 16, 17, 35, 129, 300)
NUMPY = pytest.mark.filterwarnings(  # what it says of NaN and Inf
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


def decode(tile: Any) -> Any:
    """Float32 values of a tile of FP8."""
    return FLOATS[tile.dtype.scalar][tile.data.view(np.uint8)]


@pytest.fixture(autouse=True)
def exact_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of FP8 that may hold NaN, which the interpreter takes for numbers, and the product
    with scales, which that of Triton 3.6 and 3.7 does not have."""
    if GPU:
        return
    handle = triton_interpreter.TensorHandle

    def dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        return handle(decode(a) @ decode(b) + acc.data, acc.dtype.scalar)

    def dot_scaled(
        self: Any, a: Any, a_codes: Any, a_format: str, b: Any, b_codes: Any, b_format: str,
        acc: Any, *options: Any,
    ) -> Any:  # fmt: skip
        def wide(data: Any, codes: Any, kind: str) -> Any:  # [rows, K]
            fmt = next(f for f in FORMATS if getattr(tl, f.triton) == data.dtype)
            assert (kind, codes.dtype) == (fmt.kind, tl.uint8)
            e8m0 = torch.from_numpy(codes.handle.data.copy()).view(E8M0.dtype)
            return np.repeat(decode_scale(e8m0).numpy(), 32, 1)

        product = (decode(a.handle) * wide(a, a_codes, a_format)) @ (
            decode(b.handle) * wide(b, b_codes, b_format).T
        )
        return self.tensor(handle(product + acc.handle.data, acc.handle.dtype.scalar), acc.type)

    monkeypatch.setattr(triton_interpreter.InterpreterBuilder, "create_dot", dot)
    semantic = type(triton_interpreter.interpreter_semantic)
    monkeypatch.setattr(semantic, "dot_scaled", dot_scaled)


On = Callable[[str], DeviceProfile]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Let the CPU be the named architecture; a GPU is what it is."""

    def pretend(arch: str) -> DeviceProfile:
        profile = float8.device_profile(DEVICE) if arch == "here" else describe(arch)
        for module in (matmul, matmul_triton):
            monkeypatch.setattr(module, "device_profile", lambda device: profile)
        return profile

    return pretend


def run(
    a: Matrix,
    b: Matrix,
    out_dtype: torch.dtype = torch.float32,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel alone, with no copy of operands before it."""
    given = out
    out = matmul_triton.multiply(
        a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, fast_accum, bias, out
    )
    assert out.dtype == out_dtype
    assert out.shape == (a[0].shape[0], b[0].shape[1])
    assert out.is_contiguous()
    assert given is None or out is given
    return out


def check(
    out: Tensor, a: Matrix, b: Matrix, fast_accum: bool = False, added: Tensor | None = None
) -> None:
    """As exact as rounding allows in the interpreter, whose sums are of float32. On a GPU as the
    reference, but for what tensor cores drop within a partial sum (see test_matmul.py)."""
    if not GPU:
        assert_product(out, a, b, 0.0 if added is None else added.double())
        return
    truth = values(*a) @ values(*b)
    rounding = (2.0**-10 if fast_accum else 2.0**-11) * float(truth.norm())
    reference = matmul.scaled_mm_torch(a[0], b[0], a[1], b[1], a[2], b[2], out.dtype, added)
    truth = truth if added is None else truth + added.double()
    rounding /= max(float(truth.norm()), 1e-300)
    assert relative_error(out, truth) <= 2 * relative_error(reference, truth) + rounding


def pairs(profile: DeviceProfile) -> list[tuple[Any, Any]]:
    return list(itertools.product(FNUZ if profile.flavour == "fnuz" else FN, repeat=2))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MODES)
def test_products_of_any_size(name: str, arch: str, on: On) -> None:
    """Odd sizes beside round ones, every pair of formats and every dtype; scales over three
    decades."""
    formats = pairs(on(arch))
    sizes = list(itertools.product(SIZES, SIZES, SIZES))
    # Four of 343 in the interpreter, others for each mode and architecture.
    first = list(MODES).index(name) * 31 + ARCHS.index(arch) * 11
    chosen = sizes if GPU else [sizes[(first + 86 * i) % len(sizes)] for i in range(4)]
    for i, (m, k, n) in enumerate(chosen):
        a, b = operands(m, k, n, MODES[name], formats[i % 4], DEVICE)
        out_dtype, fast_accum = OUT_DTYPES[i % 3], i % 2 == 1
        check(run(a, b, out_dtype, fast_accum), a, b, fast_accum)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MODES)
def test_a_bias_and_what_is_there_are_added(name: str, arch: str, on: On) -> None:
    """A bias before the one rounding, the reference's bits where sums are exact; the product to
    what is there. Nothing beside an output is written, wherever it begins."""
    formats = pairs(on(arch))
    first = list(MODES).index(name) + ARCHS.index(arch)
    cases = [
        ((17, 129, 300), torch.bfloat16, torch.bfloat16),
        ((129, 176, 15), torch.float32, torch.float16),
        ((35, 300, 131), torch.bfloat16, torch.float32),
        ((1, 16, 1), torch.float16, torch.float32),
    ]
    for i, ((m, k, n), dtype, other) in enumerate(cases if GPU else [cases[first % 4]]):
        pair, fast_accum = formats[(first + i) % 4], (first + i) % 2 == 1
        buffer = torch.full((m * n + 40,), -0.0, dtype=dtype, device=DEVICE)
        for make, start in ((operands, 16), (integers, 3)):
            a, b = make(m, k, n, MODES[name], pair, DEVICE)
            bias = torch.randn(n, device=DEVICE).to(other) * 9
            there = torch.randn(m, n, device=DEVICE).to(dtype) * 9
            if make is integers:
                bias = bias.round() + 0.0  # without -0
            biased = run(a, b, dtype, fast_accum, bias)
            buffer.fill_(-0.0)
            summed = buffer[start : start + m * n].view(m, n).copy_(there)
            run(a, b, dtype, fast_accum, out=summed)
            check(biased, a, b, fast_accum, bias)
            if make is integers:
                args = a[0], b[0], a[1], b[1], a[2], b[2], dtype
                assert_same_bytes(biased, matmul.scaled_mm_torch(*args, bias))
            assert_same_bytes(summed, there + run(a, b, dtype, fast_accum))
            summed.fill_(-0.0)
            assert_same_bytes(buffer, torch.full_like(buffer, -0.0))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_ops_reach_what_adds(arch: str, on: On) -> None:
    """With a bias of any strides, and operands that are copied first."""
    a, b = operands(34, 33, 20, NATIVE["row x row"], pairs(on(arch))[0], DEVICE)
    args = a[0], b[0], a[1], b[1], a[2], b[2]
    bias = torch.randn(20, 2, device=DEVICE)[:, 1]
    got = float8.ops.scaled_mm(*args, torch.bfloat16, False, "triton", bias)
    check(got, a, b, added=bias)
    there = torch.randn(34, 20, device=DEVICE)
    out = there.clone()
    float8.ops.scaled_mm_add_(out, *args, False, "triton")
    check(out, a, b, added=there)
    version = out._version
    float8.ops.scaled_mm_add_(out, *args, False, "triton")
    assert out._version > version  # autograd is told of it


@NUMPY
@pytest.mark.parametrize("arch", ARCHS)
def test_nan_and_inf_that_are_added(arch: str, on: On) -> None:
    a, b = operands(20, 48, 150, NATIVE["row x row"], pairs(on(arch))[0], DEVICE)
    for bad in (torch.nan, torch.inf):
        bias = torch.zeros(150, device=DEVICE)
        bias[149] = bad
        there = torch.zeros(20, 150, device=DEVICE)
        there[19, 3] = -bad
        got = run(a, b, bias=bias)
        assert not got[:, 149].isfinite().any() and got[:, :149].isfinite().all()
        got = run(a, b, out=there.clone())
        assert torch.equal(got.isfinite(), there.isfinite())


@pytest.mark.parametrize("arch", ARCHS)
def test_more_tiles_than_programs(arch: str, on: On) -> None:
    """Over groups of eight rows of tiles, of which the last is not full; with whole tiles of K, so
    that operands have descriptors."""
    on(arch)
    for m, k, n in ((1100, 32, 272), (5000, 16, 4112)) if GPU else ((1100, 32, 272),):
        a, b = operands(m, k, n, NATIVE["row x row"], pairs(on(arch))[0], DEVICE)
        b = (b[0].t().contiguous().t(), *b[1:])
        for fast_accum in (False, True):
            check(run(a, b, torch.bfloat16, fast_accum), a, b, fast_accum)
        there = torch.randn(m, n, device=DEVICE)
        check(run(a, b, fast_accum=True, out=there.clone()), a, b, True, there)


@NUMPY
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_nan_scales_and_nan_data_surface_where_they_belong(name: str, arch: str, on: On) -> None:
    a, b = operands(20, 290, 150, MODES[name], pairs(on(arch))[0], DEVICE)
    scale = b[1].clone()
    scale.view(torch.uint8 if scale.dtype == E8M0.dtype else torch.int32)[-1, -1] = (
        255 if scale.dtype == E8M0.dtype else 0x7FC00000
    )
    data = a[0].clone()
    data.view(torch.uint8)[3, 288] = 0x80 if "fnuz" in str(data.dtype) else 0x7F
    for x, y in ((a, (b[0], scale, b[2])), ((data, *a[1:]), b)):
        out = run(x, y)
        reference = matmul.scaled_mm_torch(x[0], y[0], x[1], y[1], x[2], y[2], torch.float32)
        assert 0 < int(out.isnan().sum())
        assert torch.equal(out.isnan(), reference.isnan())
    if "tensor" not in name:
        assert not run(a, (b[0], scale, b[2]))[:, 0].isnan().any()


def surrounded(x: Tensor) -> Tensor:
    """The same values in the middle of a larger matrix of NaN, rows and start on 16 bytes."""
    rows, columns = x.shape
    shape = rows + 260, columns + -columns % 16 + 288
    if x.element_size() == 1:
        large = torch.full(shape, 0xFF, dtype=torch.uint8, device=x.device).view(x.dtype)
    else:
        large = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    middle = large[130 : 130 + rows, 16 : 16 + columns]
    middle.view(torch.uint8 if x.element_size() == 1 else torch.int32).copy_(
        x.view(torch.uint8 if x.element_size() == 1 else torch.int32)
    )
    return middle


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_strides_do_not_change_the_product(name: str, arch: str, on: On) -> None:
    a, b = operands(34, 176, 20, MODES[name], pairs(on(arch))[0], DEVICE)
    expected = run(a, b, torch.bfloat16)
    assert expected.isfinite().all()
    rewrites = [*(REWRITES.values() if not GPU else ()), surrounded]
    rewrites.append(lambda t: surrounded(t.t()).t())
    for i, rewrite in enumerate(rewrites):
        other = rewrites[(i + 3) % len(rewrites)]  # for scales, which have strides of their own
        x, y = ((rewrite(data), other(scale), block) for data, scale, block in (a, b))
        assert_same_bytes(run(x, y, torch.bfloat16), expected)
        op = float8.ops.scaled_mm(
            x[0], y[0], x[1], y[1], x[2], y[2], torch.bfloat16, False, "triton"
        )
        assert_same_bytes(op, expected)
    row = (a[0][:1].expand(7, 176), a[1][:1], (FULL if a[2][0] == FULL else 7, a[2][1]))
    assert_same_bytes(run(row, b, torch.bfloat16), run(a, b, torch.bfloat16)[:1].expand(7, 20))


@pytest.mark.skipif(GPU, reason="looks over the interpreter's shoulder")
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_nothing_beside_the_operands_is_touched(
    name: str, arch: str, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every address that is read is one of an element, and every element of the output is written
    once."""
    on(arch)
    memory = triton_interpreter._interpreter
    load, store = memory.load, memory.store
    read: list[Any] = []
    written: list[Any] = []

    def watched_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        read.append(pointers[mask])
        return load(pointers, mask, *rest)

    def watched_store(pointers: Any, value: Any, mask: Any) -> Any:
        written.append(pointers[mask])
        return store(pointers, value, mask)

    monkeypatch.setattr(memory, "load", watched_load)
    monkeypatch.setattr(memory, "store", watched_store)

    def addresses(t: Tensor) -> Any:
        at = torch.zeros((), dtype=torch.int64)
        for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            shape = [-1 if d == dim else 1 for d in range(t.ndim)]
            at = at + (torch.arange(n) * stride).view(shape)
        return (at * t.element_size() + t.data_ptr()).numpy().ravel().astype(np.uint64)

    for m, k, n in ((67, 144, 131), (3, 33, 5)):
        a, b = operands(m, k, n, MODES[name], pairs(on(arch))[0])
        a, b = (tuple(surrounded(t) for t in x[:2]) + x[2:] for x in (a, b))
        b = (surrounded(b[0].t()).t(), *b[1:])
        read.clear()
        written.clear()
        out = run(a, b)
        theirs = np.concatenate([addresses(t) for t in (*a[:2], *b[:2])])
        seen = np.unique(np.concatenate([at.ravel() for at in read]).astype(np.uint64))
        assert np.isin(seen, theirs).all()
        assert np.isin(theirs, seen).all()
        stored = np.sort(np.concatenate([at.ravel() for at in written]).astype(np.uint64))
        assert np.array_equal(stored, np.sort(addresses(out)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["tensor x tensor", "row x row"])
def test_two_tiny_scales_do_not_underflow_before_they_meet_the_sum(
    name: str, arch: str, on: On
) -> None:
    if on(arch).flavour == "fnuz":
        pytest.skip("the operands are in FN")
    out = run(*tiny(name, DEVICE))
    expected = 448.0**2 * 512 * 2.0**-160
    assert torch.all((out.double() - expected).abs() <= 2.0**-10 * expected)


@NUMPY
@pytest.mark.parametrize("arch", ARCHS)
def test_every_e8m0_scale(arch: str, on: On) -> None:
    """Code 0 is 2^-127, which float32 holds as a subnormal, and 255 NaN."""
    fmt = pairs(on(arch))[0][0]
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(E8M0.dtype)[:, None]
    ones = torch.ones(256, 32, device=DEVICE).to(fmt.dtype)
    one = torch.full((1, 3), 127, dtype=torch.uint8, device=DEVICE).view(E8M0.dtype)
    out = run((ones, codes, (1, 32)), (ones[:3].t(), one, (32, 1)))
    expected = 32 * decode_scale(codes).expand(256, 3)
    assert torch.equal(out.nan_to_num(-1), expected.nan_to_num(-1))
    out = run((ones[:3], one.t(), (1, 32)), (ones.t(), codes.t(), (32, 1)))
    assert torch.equal(out.nan_to_num(-1), expected.t().nan_to_num(-1))


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_that_are_further_apart_than_32_bits_count(arch: str, on: On) -> None:
    if on(arch).flavour == "fnuz":
        pytest.skip("the same code as for FN")
    a, b = operands(9, 48, 5, NATIVE["row x row"], FN, DEVICE)
    memory = torch.empty(2**31 + 64, dtype=torch.uint8, device=DEVICE)  # of which little is used
    for m, stride in ((9, 2**28), (2, 2**31)):
        x = (a[0][:m], a[1][:m], a[2])
        far = memory.as_strided((m, 48), (stride, 1)).view(E4M3FN.dtype)
        far.copy_(x[0])
        assert_same_bytes(run((far, *x[1:]), b), run(x, b))


# ---- how it is launched ------------------------------------------------------------------------


def launched(a: Matrix, b: Matrix, fast_accum: bool = False, **added: Any) -> Any:
    """What the kernel is compiled for, to multiply these."""
    of = matmul_triton.Part.of
    device = torch.device(DEVICE)
    return matmul_triton._launch(
        of(a[0]), of(b[0].t()), of(a[1]), of(b[1]), a[2], b[2], torch.bfloat16, fast_accum,
        device, matmul_triton.device_profile(device), **added,
    )  # fmt: skip


def rows(m: int, k: int, n: int, name: str = "row x row") -> tuple[Matrix, Matrix]:
    a, b = operands(m, k, n, NATIVE[name], FN, DEVICE)
    return a, (b[0].t().contiguous().t(), *b[1:])


@pytest.mark.skipif(GPU, reason="asks of GPUs that are not here")
def test_sums_are_promoted_where_tensor_cores_drop_bits(on: On) -> None:
    for arch, promotes in (("sm_89", 1), ("sm_90", 1), ("sm_120", 1), ("sm_100", 0), ("gfx950", 0)):
        on(arch)
        a, b = rows(16, 128, 16)
        assert launched(a, b).launch.constants["PROMOTE"] == bool(promotes)
        assert not launched(a, b, fast_accum=True).launch.constants["PROMOTE"]


@pytest.mark.skipif(GPU, reason="asks of GPUs that are not here")
def test_scales_go_to_matrix_instructions_that_take_them(on: On) -> None:
    for arch, takes in (("sm_90", None), ("sm_120", None), ("sm_100", "e4m3"), ("gfx950", "e4m3")):
        on(arch)
        constants = launched(*rows(16, 128, 16, "mx")).launch.constants
        assert (constants["A_FORMAT"], constants["BK"]) == (takes, 128 if takes else 32)
        float32 = operands(16, 128, 16, ODD["1x32, float32 scales"], FN)
        assert launched(*float32).launch.constants["A_FORMAT"] is None


def test_one_compilation_for_any_number_of_tokens(on: On) -> None:
    """Neither the constants nor what Triton specialises on by itself know M, and of K they know
    whether it is a multiple of the tile."""
    on(ARCHS[0])
    constants = [launched(*rows(m, 256, 48)).launch.constants for m in (1, 5, 64, 1000)]
    constants += [launched(*rows(64, k, 48)).launch.constants for k in (128, 1280)]
    assert all(c == constants[0] for c in constants)
    parameters = {p.name: p for p in getattr(matmul_triton.matmul_kernel, "params", [])}
    for name in ("M", "bias", "scale_a_k", "scale_b_k") if GPU else ():
        assert parameters[name].do_not_specialize
    assert launched(*rows(5, 256, 48)) is launched(*rows(5, 256, 48))


def test_one_compilation_of_what_adds_for_any_number_of_tokens(on: On) -> None:
    """Triton knows whether an output begins on 16 bytes, and so does the key of a launch."""
    on(ARCHS[0])
    of, bf16 = matmul_triton.Part.of, torch.bfloat16
    added: list[Any] = [{"bias": bf16} for _ in range(4)]
    added += [{"into": of(torch.zeros(m, 48, device=DEVICE))} for m in (1, 5, 64, 1000)]
    constants = [
        launched(*rows(m, 256, 48), **given).launch.constants
        for m, given in zip((1, 5, 64, 1000) * 2, added, strict=True)
    ]
    plain = launched(*rows(5, 256, 48)).launch.constants
    assert all(c == plain for c in constants[:4])  # a bias is told by its pointer alone
    assert all(c == plain | {"ACCUMULATE": True} for c in constants[4:])
    flat = torch.zeros(5 * 48 + 1, device=DEVICE)
    a, b = rows(5, 256, 48)
    there, moved = (of(flat[i:][: 5 * 48].view(5, 48)) for i in (0, 1))
    assert launched(a, b, into=there) is not launched(a, b, into=moved)
    assert launched(a, b, bias=bf16) is not launched(a, b, bias=torch.float32)


def test_descriptors_are_made_of_what_they_can_describe(on: On) -> None:
    if not on(ARCHS[0]).arch.startswith(("sm_90", "sm_10")):
        pytest.skip("this GPU has no TMA")
    a, b = rows(34, 176, 20)
    assert launched(a, b).tma
    data = a[0]
    wide = surrounded(torch.zeros(34, 177, dtype=torch.uint8, device=DEVICE))
    shifted = wide.view(data.dtype)[:, 1:]
    eight = torch.zeros(34, 184, dtype=torch.uint8, device=DEVICE).view(data.dtype)[:, :176]
    for x in (data.t().contiguous().t(), data[:1].expand(34, 176), shifted, eight):
        assert not launched((x, *a[1:]), b).tma
    assert launched((surrounded(data), *a[1:]), b).tma


def test_only_operands_that_would_be_read_byte_by_byte_are_copied() -> None:
    x = torch.zeros(32, 256, dtype=torch.uint8).view(E4M3FN.dtype)
    for view in (x, x.t(), x[:, :48], x[3:7], x[:1].expand(32, 256), x.t()[:, 16:]):
        assert matmul._wide(view) is view
    for view in (x[:, 1:17], x[:, :47], x.t()[:, :31], x[:, ::2], x[:, :1]):
        copy = matmul._wide(view)
        assert copy.shape == (view.shape[0], -(-view.shape[1] // 16) * 16)
        assert copy.stride(0) % 16 == copy.data_ptr() % 16 == 0
        assert_same_bytes(copy[:, : view.shape[1]].contiguous(), view.contiguous())


# ---- which device --------------------------------------------------------------------------------


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current, which it is again behind it; another device is entered once a launch,
    and the current one never."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    current, entered, asked = [0], [0], [0]
    seen: list[tuple[str, int]] = []

    def ask() -> int:
        asked[0] += 1
        return current[0]

    @contextlib.contextmanager
    def enter(index: int) -> Iterator[None]:
        entered[0] += 1
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Kernel:
        def __init__(self, call: str) -> None:
            self.call = call

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Kernel"]:
            def called(*args: Any, **options: Any) -> Kernel:
                seen.append((self.call, current[0]))
                return Kernel("launched")

            return called

    monkeypatch.setattr(torch.cuda, "current_device", ask)
    monkeypatch.setattr(torch.cuda, "device", enter)
    with FakeTensorMode():
        tensors = [torch.empty(4, 16, device=f"cuda:{i}") for i in range(2)]
    for i, x in enumerate(tensors):
        launch = Launch(Kernel("compiled"), (1, 1, 1), options={"num_warps": 4})
        described = TensorDescriptor(x, [4, 16], [16, 1], [4, 16])
        launch(described, None, x)  # what is no tensor has no device
        launch(described, None, x, grid=(2, 1, 1))
        assert seen == [("compiled", i), ("launched", i)] and (current, entered) == ([0], [2 * i])
        seen.clear()
    asked[0] = 0
    for device in ("cpu", "meta"):  # have none to ask for
        Launch(Kernel(device), (1, 1, 1), options={})(torch.empty(4, device=device))
    assert seen == [("cpu", 0), ("meta", 0)] and not asked[0]


@needs("two_gpus")
def test_the_device_of_the_operands_need_not_be_the_current_one() -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda:0")
    indices = torch.randint(4, (256, 2), device="cuda:0")
    dtype, ops = E4M3FN.dtype, float8.ops

    def results(x: Tensor, indices: Tensor) -> list[Tensor]:
        data, scale = ops.quantize(x, (1, FULL), dtype, "fp32")
        args = data, data.t(), scale, scale.t(), (1, FULL), (FULL, 1), torch.bfloat16, True
        found = [data, scale, ops.scaled_mm(*args, "triton")]
        if float8.device_profile(x.device).arch == "sm_90":
            found.append(ops.scaled_mm(*args, "hopper"))
        found += ops.swiglu_quantize(x, x, (1, FULL), dtype, "fp32", (1, FULL), dtype, "fp32")
        routing = ops.route(indices, 4, 128)
        rows = ops.permute(x, *routing[:2])
        back = ops.unpermute(rows, routing[0])
        none = (None, None, None)
        columns = ops.quantize_grouped(rows, routing[2], *none, (1, FULL), dtype, "fp32")[2:]
        data_t, scale_t, offs_t = columns
        blocks, last = ((1, FULL), (1, FULL)), (torch.bfloat16, True, "triton")
        pair = data_t, data_t, scale_t, scale_t
        return [
            *found, *routing, rows, back, *columns,
            ops.grouped_wgrad(*pair, offs_t, *blocks, *last),
        ]  # fmt: skip

    with torch.cuda.device(0):
        expected = results(x, indices)
        for got, want in zip(results(x.to("cuda:1"), indices.to("cuda:1")), expected, strict=True):
            assert got.device.index == 1
            assert_same_bytes(got, want)
        assert torch.cuda.current_device() == 0


# ---- machine code ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", targets("products"))
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: all products are of FP8, those of MX with scales where
    the hardware has that; nothing is spilled; tiles fit into shared memory."""
    kernels = machine_code("cross_compile_matmul.py", target)
    assert len(kernels) == 29
    for kernel in kernels:
        scaled = kernel["mode"].startswith("mx") and target in ("sm_100", "sm_103", "gfx950")
        assert kernel["mx" if scaled else "fp8"] == kernel["all"] > 0, kernel
        # With groups, two words that are read once a tile may be kept in memory; on sm_120, which
        # is compiled for alone, six of any tile.
        allowed = 24 if target == "sm_120" else 8 if "," in kernel["mode"] else 0
        assert kernel["scratch"] <= allowed, kernel
        assert kernel["shared"] <= describe(target).shared_memory, kernel
        # Partial sums are added in float32, and the compiler has not undone it.
        sums = kernel["mode"].split(",")[0].split(" +")[0] in ("row", "any strides")
        promoted = target in ("sm_89", "sm_90", "sm_120") and sums
        if promoted or " + " not in kernel["mode"]:  # to what is added, there are others
            assert (kernel["adds"] > 0) == promoted, kernel
        described = target in ("sm_90", "sm_100", "sm_103") and kernel["mode"] != "any strides"
        assert (kernel["tma"] > 0) == described, kernel
        # Two programs share a multiprocessor of sm_90 where sums leave the tensor cores.
        if target == "sm_90" and "fast" not in kernel["mode"]:
            assert 2 * kernel["shared"] <= describe(target).shared_memory, kernel
