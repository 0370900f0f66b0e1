"""Casts of token groups: the reference against casts of each group alone; the Triton kernels
against the reference, on a GPU or in Triton's interpreter; and their machine code.

Letters: T tokens, K features, G groups, P columns of the column layout.
"""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import machine_code, specialisations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8
from float8.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from float8.kernels import quantize_grouped as reference
from float8.kernels.quantize import HIGH_PRECISION, TRITON_BLOCKS, CastPlan
from float8.kernels.quantize_grouped import GROUP_ALIGN, Outputs, padded_tokens
from float8.scaling import FULL, Block, block_name
from float8.testing import assert_same_bytes, deterministic, needs, targets

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ops = float8.ops
FORMATS = (E4M3FN, E5M2) if GPU else (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)
MODES = ("fp32", "fp32", "pow2", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e8m0_rceil")
NONE = (None, None, None)
PAIRS = list(itertools.product((None, *TRITON_BLOCKS), TRITON_BLOCKS))

# Sizes of the groups, and rows that are of no group; one more and one less than a tile beside it.
GROUPS: dict[str, tuple[list[int], int]] = {
    "one token": ([1], 0),
    "one group": ([150], 0),
    "all empty": ([0, 0, 0], 7),
    "no token but in the last": ([0, 0, 129], 0),
    "aligned": ([128, 0, 256], 0),
    "ragged": ([127, 1, 0, 130], 33),
    "more groups than tokens": ([0, 1] * 4 + [0] * 56, 1),
}
groups = pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())


def ends(sizes: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def draw(tokens: int, count: int, align: int, rng: random.Random) -> list[int]:
    """Sizes of groups of up to three times their mean, some of them empty, multiples of align."""
    left, sizes = tokens, []
    for _ in range(count):
        size = min(left, int(rng.choice([0, rng.uniform(0, 3)]) * tokens / count))
        sizes.append(size // align * align)
        left -= sizes[-1]
    return sizes


def plan(block: Block | None, rng: random.Random) -> CastPlan | None:
    if block is None:
        return None
    mode = rng.choice(MODES[3:]) if block == (1, 32) else rng.choice(MODES)
    return CastPlan(block, rng.choice(FORMATS).dtype, mode)


def values(tokens: int, features: int, rng: random.Random) -> Tensor:
    """Rows of many magnitudes; some blemished."""
    x = torch.randn(tokens, features) * torch.exp2(torch.randint(-12, 12, (tokens, 1)))
    blemish = rng.choice(["none", "nan", "inf", "zero row", "negative zero column"])
    if blemish in ("nan", "inf"):
        x.view(-1)[rng.randrange(x.numel())] = math.nan if blemish == "nan" else -math.inf
    elif blemish == "zero row":
        x[rng.randrange(tokens)] = 0
    elif blemish == "negative zero column":
        x[:, rng.randrange(features)] = -0.0
    return x.to(rng.choice(HIGH_PRECISION))


def stride(x: Tensor, rng: random.Random) -> Tensor:
    """The same values with other strides, or on another boundary."""
    kind = rng.choice(["contiguous", "transposed", "every other column", "from the second element"])
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "every other column":
        return torch.stack([x, x], -1)[..., 0]
    if kind == "from the second element":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return x


def launched(x: Tensor, offs: Tensor, row: CastPlan | None, col: CastPlan) -> Outputs:
    """By the kernels, with a cast of rows that shares no pass by ``quantize``."""
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels.quantize_grouped_triton import quantize_groups

    rows, columns = quantize_groups(x, offs, row, col)
    if rows is None:
        rows = ops.quantize(x, *row) if row else (x.new_empty(0), x.new_empty(0))
    return (*rows, *columns)


def by_reference(x: Tensor, offs: Tensor, row: CastPlan | None, col: CastPlan) -> Outputs:
    return reference.quantize_grouped(x.cpu(), offs.cpu(), *(row or NONE), *col)


def assert_same(got: Outputs, expected: Outputs) -> None:
    for name, ours, theirs in zip(
        ("data", "scale", "data_t", "scale_t", "offs_t"), got, expected, strict=True
    ):
        try:
            assert_same_bytes(ours, theirs)
            assert ours.stride() == theirs.stride()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ---------------------------------------------------------------------------------- the reference


@groups
@pytest.mark.parametrize(
    ("block", "mode"),
    [
        ((1, FULL), "fp32"),
        ((FULL, FULL), "pow2"),
        ((2, FULL), "fp32"),
        ((1, 128), "fp32"),
        ((1, 32), "e8m0_rceil"),
        ((128, 128), "fp32"),
        ((3, 4), "fp32"),
        ((1, 1), "fp32"),
    ],
    ids=str,
)
def test_a_group_is_cast_as_if_it_were_alone(
    sizes: tuple[list[int], int], block: Block, mode: str
) -> None:
    of_groups, others = sizes
    x = torch.randn(sum(of_groups) + others, 5)
    cast = (block, E4M3FN.dtype, mode)
    _, _, data_t, scale_t, offs_t = ops.quantize_grouped(x, ends(of_groups), *NONE, *cast)
    assert data_t.shape == (5, padded_tokens(len(x), len(of_groups)))
    covered = torch.zeros(data_t.shape[1], dtype=torch.bool)
    row = start = 0
    for g, size in enumerate(of_groups):
        data, scale = ops.quantize(x[row : row + size].t(), *cast)
        end = int(offs_t[g])
        assert start % GROUP_ALIGN == 0
        assert end - start == math.ceil(size / GROUP_ALIGN) * GROUP_ALIGN
        assert_same_bytes(data_t[:, start : start + size], data)
        if block[1] == FULL:
            assert_same_bytes(scale_t[g], scale[:, 0])
        else:
            first = start // block[1]
            assert_same_bytes(scale_t[:, first : first + scale.shape[1]], scale)
        covered[start : start + size] = True
        row, start = row + size, end
    assert not data_t.view(torch.uint8)[:, ~covered].any()
    if block[1] != FULL:
        lowest = ops.quantize(torch.zeros(1, 1), *cast)[1]
        padding = ~covered.view(-1, block[1]).any(1)
        assert set(scale_t[:, padding].float().flatten().tolist()) <= {float(lowest.float())}


@groups
def test_rows_are_cast_as_one_matrix(sizes: tuple[list[int], int]) -> None:
    """Also those of no group."""
    of_groups, others = sizes
    x = torch.randn(sum(of_groups) + others, 40, dtype=torch.bfloat16)
    col = ((1, FULL), E5M2.dtype, "fp32")
    for row in [((1, FULL), E4M3FN.dtype, "fp32"), ((1, 32), E4M3FN.dtype, "e8m0_rceil")]:
        got = ops.quantize_grouped(x, ends(of_groups), *row, *col)
        for ours, theirs in zip(got, ops.quantize(x, *row), strict=False):
            assert_same_bytes(ours, theirs)
            assert ours.stride() == theirs.stride()
    left_out = ops.quantize_grouped(x, ends(of_groups), *NONE, *col)
    assert left_out[0].numel() == left_out[1].numel() == 0


def test_column_layout_is_no_longer_than_it_can_need() -> None:
    """Against the longest of all ways to share a few tokens, and of one long group with others."""

    def needed(sizes: tuple[int, ...]) -> int:
        return sum(math.ceil(size / GROUP_ALIGN) * GROUP_ALIGN for size in sizes)

    for count in (1, 2, 3):
        for tokens in (0, 1, 2, 5, 127, 128, 129, 257, 300):
            ways = itertools.product(range(tokens + 1), repeat=count) if tokens < 6 else ()
            longest = max((needed(way) for way in ways if sum(way) <= tokens), default=0)
            for small in range(min(count, tokens)):
                longest = max(longest, needed((*[1] * small, tokens - small)))
            assert padded_tokens(tokens, count) == longest


# ------------------------------------------------------------------------------------ the kernels

# T, K, G, what sizes are multiples of
SHAPES = [
    (1, 1, 1, 1),
    (5, 129, 8, 1),
    (300, 5, 3, 16),
    (300, 40, 8, 1),
    (140, 300, 3, 1),
    (384, 64, 3, 128),
    (70, 16, 64, 1),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_the_bytes_of_the_reference(shape: tuple[int, int, int, int]) -> None:
    """Into memory full of NaN."""
    tokens, features, count, align = shape
    rng = random.Random(str(shape))
    torch.manual_seed(rng.randrange(1000))
    # The interpreter takes 10 ms a program, and a GPU a second to compile one: some of the pairs,
    # others for each shape.
    for row_block, col_block in rng.sample(PAIRS, 15 if GPU else 4 if count < 64 else 2):
        row, col = plan(row_block, rng), plan(col_block, rng)
        assert col is not None
        sizes = draw(tokens, count, align, rng)
        x, offs = stride(values(tokens, features, rng).to(DEVICE), rng), ends(sizes, DEVICE)
        expected = by_reference(x, offs, row, col)
        with deterministic():
            got = launched(x, offs, row, col)
        try:
            assert_same(got, expected)
        except AssertionError as error:
            raise AssertionError(f"{row} {col} {x.dtype} {x.stride()} {sizes}: {error}") from error


@groups
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=block_name)
def test_kernels_for_groups_of_any_size(sizes: tuple[list[int], int], block: Block) -> None:
    of_groups, others = sizes
    x, offs = torch.randn(sum(of_groups) + others, 20, device=DEVICE), ends(of_groups, DEVICE)
    cast = CastPlan(block, E4M3FN.dtype, "fp32")
    expected = by_reference(x, offs, cast, cast)
    with deterministic():
        got = launched(x, offs, cast, cast)
    assert_same(got, expected)


@pytest.mark.parametrize("features", [16384, 16400] if GPU else [2048, 2100])
def test_rows_of_any_length(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit the rows share the pass that measures groups; that goes by pieces of rows
    otherwise."""
    kernels = pytest.importorskip("float8.kernels.quantize_grouped_triton")
    if not GPU:
        monkeypatch.setattr(kernels, "MAX_ROW", 2048)
    x, offs = torch.randn(2, features, device=DEVICE), ends([2], DEVICE)
    row = CastPlan((1, FULL), E4M3FN.dtype, "fp32")
    for block in [(1, FULL), (FULL, FULL)]:
        col = row._replace(block=block)
        assert_same(launched(x, offs, row, col), by_reference(x, offs, row, col))


def test_rows_that_are_far_apart_or_the_same(tmp_path: Path) -> None:
    """2^31 elements from one row to the next; none."""
    size, options = (1 << 31) + 8, {"dtype": torch.bfloat16, "device": DEVICE}
    if GPU:
        far = torch.empty(size, **options)
    else:  # a file that is nearly all hole takes no memory
        far = torch.from_file(str(tmp_path / "far"), shared=True, size=size, **options)
    far[:8], far[-8:] = torch.randn(8), torch.randn(8)
    same = torch.randn(1, 8, device=DEVICE).expand(130, 8)
    for x, sizes in [(far.as_strided((2, 8), (1 << 31, 1)), [0, 2]), (same, [129, 1])]:
        for block in [(1, 128), (1, FULL)]:
            offs, cast = ends(sizes, DEVICE), CastPlan(block, E4M3FN.dtype, "fp32")
            assert_same(launched(x, offs, cast, cast), by_reference(x, offs, cast, cast))


def test_offsets_may_be_a_view() -> None:
    x, table = torch.randn(9, 16, device=DEVICE), torch.full((3, 3), 99, dtype=torch.int32)
    table[:, 1] = ends([4, 0, 3])
    offs = table.to(DEVICE)[:, 1]
    cast = CastPlan((1, FULL), E4M3FN.dtype, "fp32")
    assert_same(launched(x, offs, cast, cast), by_reference(x, offs, cast, cast))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Inf * 0 in numpy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=block_name)
def test_a_bad_value_stays_in_its_group(block: Block, bad: float) -> None:
    sizes = [130, 3, 128]
    x, offs = torch.randn(261, 8, device=DEVICE), ends(sizes, DEVICE)
    cast = CastPlan(block, E4M3FN.dtype, "fp32")
    clean = launched(x, offs, None, cast)
    x[131, 2] = bad
    spoilt = launched(x, offs, None, cast)
    start, end = spoilt[4][:2].tolist()
    for before, now in zip(clean[2:4], spoilt[2:4], strict=True):
        if before.shape[0] == len(sizes):  # scales, a row per group
            assert now[1].isnan().any()
            assert_same_bytes(before[[0, 2]], now[[0, 2]])
        else:
            per = GROUP_ALIGN * before.shape[1] // clean[2].shape[1]  # entries for a tile
            first, last = start // GROUP_ALIGN * per, end // GROUP_ALIGN * per
            assert before.shape[1] == now.shape[1]
            assert_same_bytes(before[:, :first], now[:, :first])
            assert_same_bytes(before[:, last:], now[:, last:])
    assert_same(spoilt, by_reference(x, offs, None, cast))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that nobody wrote
@pytest.mark.parametrize(
    "offs", [[300, 20, 300], [-5, 7, 20], [10, 9999, 2**31 - 1], [-(2**31), 300, 2]], ids=str
)
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=block_name)
def test_wrong_offsets_write_nowhere_else(
    block: Block, offs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the outputs then hold is undefined; the memory around all that is allocated stays."""
    fences: list[Tensor] = []

    def fenced(x: Tensor, shape: Any, *strides: Any, dtype: Any = None, **others: Any) -> Tensor:
        if dtype is None:  # the interpreter's own
            return torch.empty(shape, dtype=x.dtype, **others)
        width, length = 1 << 18, math.prod(shape) * dtype.itemsize
        memory = torch.full((2 * width + length,), 0xA5, dtype=torch.uint8, device=x.device)
        fences.extend([memory[:width], memory[width + length :]])
        inside = memory[width : width + length].view(dtype).view(shape)
        return inside.as_strided(shape, *strides) if strides else inside

    x = torch.randn(300, 8, device=DEVICE)
    wrong = torch.tensor(offs, dtype=torch.int32, device=DEVICE)
    cast = CastPlan(block, E4M3FN.dtype, "fp32")
    row = cast if block in ((1, FULL), (1, 128)) else None
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", fenced)
        patch.setattr(Tensor, "new_empty_strided", fenced)
        _, _, data_t, _, offs_t = launched(x, wrong, row, cast)
    # What multiplies them must not leave them either.
    assert [0, *offs_t.tolist(), data_t.shape[1]] == sorted([0, *offs_t.tolist(), data_t.shape[1]])
    assert len(fences) >= 6
    assert all((fence == 0xA5).all() for fence in fences)


@pytest.mark.parametrize(
    ("block", "row_block"), [((1, FULL), (1, FULL)), ((1, 128), (1, 128)), ((FULL, FULL), None)]
)
def test_constants_of_a_kernel_do_not_depend_on_tokens(
    block: Block, row_block: Block | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled kernel serves every number of tokens: constants stay, and what Triton would
    specialise on (a multiple of 16, 1) is left out or always the same."""
    kernels = pytest.importorskip("float8.kernels.quantize_grouped_triton")
    names = ("group_tile_kernel", "group_rows_kernel", "group_amax_kernel")
    seen = specialisations(monkeypatch, kernels, names)
    monkeypatch.setattr(kernels, "_launches", kernels._launches.__wrapped__)
    col = CastPlan(block, E4M3FN.dtype, "fp32")
    row = None if row_block is None else col._replace(block=row_block)
    for tokens in (1, 2, 16, 127, 128, 129, 2048, 5000):
        x = torch.empty(tokens, 32, device=DEVICE)
        kernels.quantize_groups(x, ends([1, 0, tokens - 1], DEVICE), row, col)
    run = [name for name in names if seen[name]]
    assert run and all(len(seen[name]) == 1 for name in run), seen


@needs("fp8")
def test_other_offsets_and_tokens_compile_nothing() -> None:
    """Counted in Triton's own caches."""
    from float8.kernels import quantize_grouped_triton as kernels

    def compiled() -> int:
        jitted = (kernels.group_tile_kernel, kernels.group_rows_kernel, kernels.group_amax_kernel)
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())

    def run(tokens: int, sizes: list[int]) -> None:
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        for block in TRITON_BLOCKS:
            cast = (block, E4M3FN.dtype, "fp32")
            for row in (NONE, cast):
                ops.quantize_grouped(x, ends(sizes, "cuda"), *row, *cast)

    run(1000, [300, 0, 700])
    kernels._launches.cache_clear()  # what is prepared is not looked up again
    before = compiled()
    assert before > 0
    for tokens, sizes in [(1000, [1, 2, 3]), (1, [0, 0, 1]), (16, [16, 0, 0]), (4099, [0, 0, 0])]:
        run(tokens, sizes)
        kernels._launches.cache_clear()
    assert compiled() == before


@needs("cuda")
@pytest.mark.parametrize("row_block", [None, (1, FULL), (1, 128), (FULL, FULL), (1, 64)], ids=str)
def test_the_op_gives_the_bytes_of_a_cpu(row_block: Block | None) -> None:
    """Through the dispatcher, also where kernels refuse, and without waiting for the device."""
    x, offs = torch.randn(777, 200, dtype=torch.bfloat16), ends([200, 0, 477])
    for block in (*TRITON_BLOCKS, (1, 64)):
        col = (block, E4M3FN.dtype, "fp32")
        row = NONE if row_block is None else (row_block, E4M3FN.dtype, "fp32")
        expected = ops.quantize_grouped(x, offs, *row, *col)
        on_gpu = x.cuda(), offs.cuda()
        ops.quantize_grouped(*on_gpu, *row, *col)
        torch.cuda.set_sync_debug_mode("error" if block in TRITON_BLOCKS else "default")
        try:
            got = ops.quantize_grouped(*on_gpu, *row, *col)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(got, expected)


# ------------------------------------------------------------------- fake tensors, opcheck, compile

SETTINGS = [
    (NONE, ((1, FULL), E4M3FN.dtype, "fp32")),
    (((1, FULL), E4M3FN.dtype, "fp32"), ((1, FULL), E5M2.dtype, "pow2")),
    (((1, 128), E4M3FN.dtype, "fp32"), ((1, 128), E4M3FN.dtype, "fp32")),
    (((1, 32), E4M3FN.dtype, "e8m0_rceil"), ((1, 32), E4M3FN.dtype, "e8m0_rceil")),
    (((128, 128), E4M3FN.dtype, "fp32"), ((FULL, FULL), E4M3FN.dtype, "fp32")),
    (NONE, ((128, 128), E4M3FN.dtype, "fp32")),
]
settings = pytest.mark.parametrize(("row", "col"), SETTINGS, ids=str)


@settings
def test_opcheck(row: tuple[Any, ...], col: tuple[Any, ...]) -> None:
    x, offs = torch.randn(150, 33, dtype=torch.bfloat16, device=DEVICE), ends([20, 0, 120], DEVICE)
    op = torch.ops.float8.quantize_grouped.default
    torch.library.opcheck(op, (x, offs, *row, *col))


@settings
@groups
def test_fake_and_meta_tensors_have_the_real_shapes_and_strides(
    sizes: tuple[list[int], int], row: tuple[Any, ...], col: tuple[Any, ...]
) -> None:
    def facts(tensors: tuple[Tensor, ...]) -> list[object]:
        return [(t.shape, t.dtype, t.stride()) for t in tensors]

    of_groups, others = sizes
    for features in (1, 40):
        x, offs = torch.randn(sum(of_groups) + others, features), ends(of_groups)
        real = ops.quantize_grouped(x, offs, *row, *col)
        assert facts(ops.quantize_grouped(x.to("meta"), offs.to("meta"), *row, *col)) == facts(real)
        with FakeTensorMode() as fake:
            faked = (fake.from_tensor(x), fake.from_tensor(offs))
            assert facts(ops.quantize_grouped(*faked, *row, *col)) == facts(real)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("block", TRITON_BLOCKS, ids=block_name)
def test_nothing_to_cast(shape: tuple[int, int], block: Block) -> None:
    x, offs = torch.randn(shape, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    _, _, data_t, scale_t, offs_t = ops.quantize_grouped(
        x, offs, *NONE, block, E4M3FN.dtype, "fp32"
    )
    assert data_t.shape == (shape[1], padded_tokens(shape[0], 2))
    assert offs_t.tolist() == [0, 0]
    assert set(scale_t.flatten().tolist()) <= {2.0**-126}


def test_a_compiled_graph_serves_all_offsets_and_tokens() -> None:
    """Two graphs at most: one of the first number of tokens, one of any; none for other offsets."""
    from torch._dynamo.testing import CompileCounter

    counts = CompileCounter()
    cast = ((1, FULL), E4M3FN.dtype, "fp32")

    def columns(x: Tensor, offs: Tensor) -> Outputs:
        return ops.quantize_grouped(x * 2, offs, *cast, *cast)

    compiled = torch.compile(columns, backend=counts, fullgraph=True)
    for sizes, graphs in [([30, 0, 70], 1), ([1, 99, 0], 1), ([50, 6, 7], 2), ([0, 1, 180], 2)]:
        x, offs = torch.randn(sum(sizes), 24, device=DEVICE), ends(sizes, DEVICE)
        assert_same(compiled(x, offs), columns(x, offs))
        assert counts.frame_count == graphs


def test_inductor_gives_eager_bytes() -> None:
    cast = ((1, 128), E4M3FN.dtype, "fp32")

    def columns(x: Tensor, offs: Tensor) -> Outputs:
        return ops.quantize_grouped(x, offs, *cast, *cast)

    x, offs = torch.randn(200, 24, dtype=torch.bfloat16, device=DEVICE), ends([50, 150], DEVICE)
    assert_same(torch.compile(columns, fullgraph=True)(x, offs), columns(x, offs))


def test_what_the_reference_refuses_fake_tensors_refuse() -> None:
    """All but the values in offs; the texts are in docs/refusals.md."""
    x, offs, cast = torch.randn(6, 8), ends([2, 4]), ((1, FULL), E4M3FN.dtype, "fp32")
    for device in ("cpu", "meta"):
        a, b = x.to(device), offs.to(device)
        for wrong in [
            (a[0], b, *NONE, *cast),
            (a.double(), b, *NONE, *cast),
            (a, b.long(), *NONE, *cast),
            (a, b[None], *NONE, *cast),
            (a, b[:0], *NONE, *cast),
            (a, b, *NONE, (1, 96), *cast[1:]),
            (a, b, *NONE, (1, 1, FULL), *cast[1:]),
            (a, b, *NONE, (1, FULL), E4M3FN.dtype, "fp16"),
            (a, b, (1, FULL), None, None, *cast),
            (a, b, (1, FULL), E4M3FN.dtype, "fp16", *cast),
        ]:
            with pytest.raises(ValueError):
                ops.quantize_grouped(*wrong)
    with pytest.raises(ValueError, match="operands are on cpu and meta"):
        ops.quantize_grouped(x, offs.to("meta"), *NONE, *cast)


# ----------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize("target", targets("casts of groups"))
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: wide accesses, hardware conversions, nothing in scratch,
    no fences."""
    pytest.importorskip("triton")
    kernels = machine_code("cross_compile.py", "--grouped", target)
    assert {k["kernel"] for k in kernels} == {
        "group_tile_kernel", "group_rows_kernel", "group_amax_kernel"
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["scratch"] == kernel["fences"] == kernel["stack_pointer_reads"] == 0, kernel
        # What ptxas puts aside for Blackwell is a few values of the tile of a 1x128 pair.
        few = target.startswith("sm_1") and (kernel["kind"], kernel["layouts"]) == ("block", "dual")
        assert kernel["spills"] <= (8 if few else 0), kernel
        # Of the amax that all rows share.
        of_all = kernel["kernel"] == "group_amax_kernel" and kernel["kind"] == "tensor"
        assert bool(kernel["atomics"]) == (of_all and kernel["layouts"] == "dual"), kernel
        assert kernel["shared"] <= 64 * 1024, kernel
        if kernel["kernel"] == "group_tile_kernel":
            # All but the search for the tile's group, and scales and amaxes.
            assert kernel["wide_loads"] >= 0.5 * kernel["loads"], kernel
            assert kernel["conversions"] >= 8, kernel
            if kernel["kind"] != "mx":
                assert kernel["wide_stores"] >= 0.5 * kernel["stores"], kernel
