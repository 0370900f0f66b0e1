"""Casts of token groups fused with SwiGLU and its backward: the ops, and their Triton kernels.

Where a sigmoid is a power of two, kernels and reference agree byte for byte; what the kernels make
of others is that of the dense fused kernels, byte for byte, which ``test_fused.py`` holds against
the exact result. The kernels run on a GPU where there is one, elsewhere in Triton's interpreter.

Letters: T tokens, F hidden features, G groups.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from recorders import machine_code, specialisations
from test_fused import exact, quiet, stride, triton
from test_quantize_grouped import GROUPS, NONE, assert_same, draw, ends, plan
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import float8
from float8.formats import E4M3FN, E5M2
from float8.kernels import fused
from float8.kernels.quantize import HIGH_PRECISION, TRITON_BLOCKS, CastPlan
from float8.kernels.quantize_grouped import Outputs
from float8.scaling import FULL, Block, as_bytes
from float8.testing import assert_same_bytes, deterministic, needs, targets

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ops = float8.ops
# The op, and whether the gradients are one matrix.
SOURCES: dict[str, bool | None] = {"forward": None, "joint": True, "apart": False}
source = pytest.mark.parametrize("joint", SOURCES.values(), ids=SOURCES.keys())
ROWS = CastPlan((1, FULL), E4M3FN.dtype, "fp32")
TENSOR, BLOCKS = ROWS._replace(block=(FULL, FULL)), ROWS._replace(block=(1, 128))


def shared(row: Block | None, col: Block) -> bool:
    """Whether the kernels write these rows beside these columns."""
    return row in (None, (1, 32), (1, 128)) or (col[1] == FULL and row != (128, 128))


PAIRS = [p for p in itertools.product((None, *TRITON_BLOCKS), TRITON_BLOCKS) if shared(*p)]


def inputs(
    joint: bool | None, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Of an op, such that the sigmoids are powers of two."""
    found = exact("swiglu" if joint is None else "swiglu_backward", shape, dtype)
    return [t for t in found if t is not None]


def by_op(
    given: list[Tensor], joint: bool | None, offs: Tensor, row: CastPlan | None, col: CastPlan
) -> Outputs:
    casts = *(row or NONE), *col
    if joint is None:
        found: Outputs = ops.swiglu_quantize_grouped(*given, offs, *casts)
    else:
        found = ops.swiglu_backward_quantize_grouped(*given, offs, joint, *casts)
    return found


def by_kernels(
    given: list[Tensor], joint: bool | None, offs: Tensor, row: CastPlan | None, col: CastPlan
) -> Outputs:
    """Into memory full of NaN."""
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels.quantize_grouped_triton import crosses_halves, group_layouts

    *grad, gate, up = given
    assert not joint or not crosses_halves(gate.shape[1], row, col)
    name = "swiglu" if joint is None else "swiglu_backward"
    with deterministic():
        rows, columns = group_layouts(
            name, (gate, up, *grad, None)[:3], offs, bool(joint), row, col
        )
    return (*(rows or (gate.new_empty(0),) * 2), *columns)


def by_reference(
    given: list[Tensor], joint: bool | None, offs: Tensor, row: CastPlan | None, col: CastPlan
) -> Outputs:
    return by_op([t.cpu() for t in given], joint, offs.cpu(), row, col)


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("row", [None, ROWS, TENSOR, BLOCKS], ids=str)
@pytest.mark.parametrize("col", [ROWS, TENSOR, BLOCKS], ids=str)
def test_ops_are_their_producer_and_a_cast_of_groups(row: CastPlan | None, col: CastPlan) -> None:
    grad, gate, up = (torch.randn(150, 40, dtype=torch.bfloat16) for _ in range(3))
    offs, casts = ends([20, 0, 120]), (*(row or NONE), *col)
    h = fused.swiglu(gate, up)
    assert_same(
        ops.swiglu_quantize_grouped(gate, up, offs, *casts), ops.quantize_grouped(h, offs, *casts)
    )
    gradients = fused.swiglu_backward(grad, gate, up)
    together = ops.quantize_grouped(torch.cat(gradients, 1), offs, *casts)
    assert_same(ops.swiglu_backward_quantize_grouped(grad, gate, up, offs, True, *casts), together)
    *apart, offs_t = ops.swiglu_backward_quantize_grouped(grad, gate, up, offs, False, *casts)
    for i, g in enumerate(gradients):
        parts = [t[i] if t.numel() else t for t in apart]
        assert_same((*parts, offs_t), ops.quantize_grouped(g, offs, *casts))


# -------------------------------------------------------------------------------------- the kernels

# T, F, G: odd beside round, more than a tile in either direction, more groups than tokens
SHAPES = [(1, 1, 1), (5, 129, 8), (260, 40, 3), (140, 150, 3), (129, 128, 2), (9, 16, 20)]


@triton
@quiet
@source
@pytest.mark.parametrize("index", range(len(SHAPES)), ids=lambda i: str(SHAPES[i]))
def test_kernels_give_the_bytes_of_the_reference(index: int, joint: bool | None) -> None:
    """Every pair of blocks, over the shapes; formats, modes, dtypes and strides by chance."""
    kernels = pytest.importorskip("float8.kernels.quantize_grouped_triton")
    tokens, features, count = SHAPES[index]
    rng = random.Random(f"{index} {joint}")
    random.seed(index)
    torch.manual_seed(index)
    pairs = random.Random(str(joint)).sample(PAIRS, len(PAIRS))
    for row_block, col_block in pairs[index :: len(SHAPES)]:
        row, col = plan(row_block, rng), plan(col_block, rng)
        assert col is not None
        f = features
        while joint and kernels.crosses_halves(f, row, col):
            f += 1
        given = inputs(joint, (tokens, f), rng.choice(HIGH_PRECISION))
        given = [stride(t.to(DEVICE), rng) for t in given]
        offs = ends(draw(tokens, count, 1, rng), DEVICE)
        expected = by_reference(given, joint, offs, row, col)
        try:
            assert_same(by_kernels(given, joint, offs, row, col), expected)
        except AssertionError as error:
            raise AssertionError(f"{row} {col} {given[0].dtype} {f} {offs}: {error}") from error


@triton
@quiet
@source
@pytest.mark.parametrize("case", ["one token", "all empty", "ragged", "more groups than tokens"])
def test_groups_of_any_size_beside_rows_that_hold_anything(case: str, joint: bool | None) -> None:
    """Rows of no group hold NaN, which reaches their own bytes alone."""
    of_groups, others = GROUPS[case]
    given = inputs(joint, (sum(of_groups) + others, 24))
    for t in given:
        t[sum(of_groups) :] = math.nan
    given, offs = [t.to(DEVICE) for t in given], ends(of_groups, DEVICE)
    got = by_kernels(given, joint, offs, ROWS, ROWS)
    assert_same(got, by_reference(given, joint, offs, ROWS, ROWS))
    assert not got[3].isnan().any()
    rows = got[1].reshape(-1, sum(of_groups) + others)
    assert not rows[:, : sum(of_groups)].isnan().any() and rows[:, sum(of_groups) :].isnan().all()


@triton
@quiet
def test_halves_of_one_product_and_a_gradient_that_is_expanded() -> None:
    gate, up = inputs(None, (70, 128))
    gate, up = torch.cat([gate, up], 1).to(DEVICE).chunk(2, 1)
    grad = torch.full((1, 1), 0.5, dtype=torch.bfloat16, device=DEVICE).expand(70, 128)
    offs = ends([33, 0, 30], DEVICE)
    for joint, given in ((None, [gate, up]), (True, [grad, gate, up]), (False, [grad, gate, up])):
        for cast in (ROWS, BLOCKS):
            expected = by_reference(given, joint, offs, cast, cast)
            assert_same(by_kernels(given, joint, offs, cast, cast), expected)


@triton
@quiet
@source
def test_rows_longer_than_a_program_holds(
    joint: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if that were 128 columns of the forward; measured in pieces, and written by the tiles."""
    if not GPU:
        import interpreter  # noqa: F401
    from float8.kernels import quantize_grouped_triton

    for name in ("MAX_ROW", "_CHUNK"):
        monkeypatch.setattr(quantize_grouped_triton, name, 128)
    monkeypatch.setattr(
        quantize_grouped_triton, "_launches", quantize_grouped_triton._launches.__wrapped__
    )
    given = [t.to(DEVICE) for t in inputs(joint, (3, 300))]
    offs = ends([2, 0], DEVICE)
    for row, col in ((ROWS, TENSOR), (TENSOR, ROWS)):
        expected = by_reference(given, joint, offs, row, col)
        assert_same(by_kernels(given, joint, offs, row, col), expected)


@triton
def test_what_kernels_refuse_they_know() -> None:
    """A joint matrix whose halves share a block; rows that no pass of the columns' shares."""
    from float8.kernels.quantize_grouped_triton import crosses_halves, shares_a_pass

    mx, square = ROWS._replace(block=(1, 32)), ROWS._replace(block=(128, 128))
    assert crosses_halves(200, BLOCKS, ROWS) and crosses_halves(200, None, square)
    assert not crosses_halves(256, BLOCKS, square)
    assert crosses_halves(96, mx, mx) and not crosses_halves(192, mx, mx)
    assert not crosses_halves(7, ROWS, ROWS) and not crosses_halves(7, None, BLOCKS)
    assert [pair for pair in itertools.product(TRITON_BLOCKS, repeat=2) if shared(*pair)] == [
        (row, col)
        for row, col in itertools.product(TRITON_BLOCKS, repeat=2)
        if shares_a_pass(ROWS._replace(block=row), ROWS._replace(block=col))
    ]


@triton
@source
@pytest.mark.parametrize("cast", [ROWS, TENSOR, BLOCKS], ids=str)
def test_constants_of_a_kernel_do_not_depend_on_tokens(
    cast: CastPlan, joint: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``test_quantize_grouped``: one compiled kernel serves every number of tokens."""
    from float8.kernels import quantize_grouped_triton as kernels

    names = ("group_tile_kernel", "group_rows_kernel", "group_amax_kernel")
    seen = specialisations(monkeypatch, kernels, names)
    monkeypatch.setattr(kernels, "_launches", kernels._launches.__wrapped__)
    for tokens in (1, 2, 16, 127, 128, 129, 2048, 5000):
        grad, gate, up = torch.empty(3, tokens, 128, device=DEVICE)
        name = "swiglu" if joint is None else "swiglu_backward"
        third = None if joint is None else grad
        offs = ends([1, 0, tokens - 1], DEVICE)
        kernels.group_layouts(name, (gate, up, third), offs, bool(joint), cast, cast)
    run = [name for name in names if seen[name]]
    assert run and all(len(seen[name]) == 1 for name in run), seen


@needs("cuda")
@source
@pytest.mark.parametrize("cast", [ROWS, TENSOR, BLOCKS, BLOCKS._replace(block=(1, 32))], ids=str)
def test_the_bytes_of_the_dense_kernels(joint: bool | None, cast: CastPlan) -> None:
    """Of any values, where all tokens are one group: rows, but those that are scaled jointly, and
    columns, which for the dense ops are the transpose. Without waiting for the device."""
    for tokens, features in ((384, 1408), (1000, 256)):
        grad, gate, up = (torch.randn(tokens, features).bfloat16().cuda() for _ in range(3))
        offs = ends([tokens], "cuda")
        given = [gate, up] if joint is None else [grad, gate, up]
        by_op(given, joint, offs, cast, cast)
        torch.cuda.set_sync_debug_mode("error")
        try:
            data, scale, data_t, scale_t, _ = by_op(given, joint, offs, cast, cast)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        dense = ops.swiglu_quantize if joint is None else ops.swiglu_backward_quantize
        rows, row_scale, columns, column_scale = map(as_bytes, dense(*given, *cast, *cast))
        data, scale, data_t, scale_t = map(as_bytes, (data, scale, data_t, scale_t))
        if joint:
            rows, row_scale = torch.cat([*rows], 1), torch.cat([*row_scale], 1)
            columns, column_scale = columns.flatten(0, 1), column_scale.flatten(0, 1)
        if not joint or cast.block[1] != FULL:
            assert_same_bytes(data, rows)
            assert_same_bytes(scale, row_scale)
        if joint and cast is TENSOR:  # one scale of both halves
            assert_same_bytes(scale_t, column_scale.amax(0, keepdim=True))
            continue
        assert_same_bytes(data_t[..., :tokens], columns)
        if cast is ROWS:
            assert_same_bytes(scale_t.reshape(-1), column_scale.reshape(-1))
        elif cast is not TENSOR:
            assert_same_bytes(scale_t[..., : column_scale.shape[-1]], column_scale)


@needs("fp8")
def test_other_offsets_and_tokens_compile_nothing() -> None:
    """Counted in Triton's own caches."""
    from float8.kernels import quantize_grouped_triton as kernels

    def compiled() -> int:
        jitted = (kernels.group_tile_kernel, kernels.group_rows_kernel, kernels.group_amax_kernel)
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())

    def run(tokens: int, sizes: list[int]) -> None:
        grad, gate, up = torch.randn(3, tokens, 256, device="cuda").bfloat16()
        for cast, joint in itertools.product((ROWS, TENSOR, BLOCKS), SOURCES.values()):
            given = [gate, up] if joint is None else [grad, gate, up]
            by_op(given, joint, ends(sizes, "cuda"), cast, cast)
        kernels._launches.cache_clear()  # what is prepared is not looked up again

    run(1000, [300, 0, 700])
    before = compiled()
    assert before > 0
    for tokens, sizes in [(1000, [1, 2, 3]), (1, [0, 0, 1]), (16, [16, 0, 0]), (4099, [0, 0, 0])]:
        run(tokens, sizes)
    assert compiled() == before


@needs("cuda")
@source
@pytest.mark.parametrize("blocks", [((1, 64), (1, 64)), ((1, FULL), (1, 128)), ((1, 128),) * 2])
def test_what_kernels_refuse_is_cast_by_others(
    joint: bool | None, blocks: tuple[Block, Block]
) -> None:
    """Blocks that no kernel has, rows beside blocks of columns, halves that share a block."""
    row, col = (ROWS._replace(block=block) for block in blocks)
    given = [t.cuda() for t in inputs(joint, (300, 200))]
    offs = ends([100, 0, 170], "cuda")
    got = by_op(given, joint, offs, row, col)
    assert_same(got, by_reference(given, joint, offs, row, col))


# ------------------------------------------------------------------ fake tensors, opcheck, compile

SETTINGS = [(None, ROWS), (ROWS, ROWS._replace(dtype=E5M2.dtype)), (BLOCKS, BLOCKS)]
settings = pytest.mark.parametrize(("row", "col"), [*SETTINGS, (TENSOR, TENSOR)], ids=str)


def call(
    joint: bool | None, row: CastPlan | None, col: CastPlan, tokens: int, features: int
) -> tuple[Any, tuple[Any, ...]]:
    """An op, and arguments of it."""
    grad, gate, up = torch.randn(3, tokens, features, dtype=torch.bfloat16, device=DEVICE)
    offs, casts = ends([tokens // 3, 0, tokens // 2], DEVICE), (*(row or NONE), *col)
    if joint is None:
        return torch.ops.float8.swiglu_quantize_grouped.default, (gate, up, offs, *casts)
    op = torch.ops.float8.swiglu_backward_quantize_grouped.default
    return op, (grad, gate, up, offs, joint, *casts)


@settings
@source
def test_opcheck(joint: bool | None, row: CastPlan | None, col: CastPlan) -> None:
    op, args = call(joint, row, col, 150, 33)
    torch.library.opcheck(op, args)


@settings
@source
def test_fake_and_meta_tensors_have_the_real_shapes_and_strides(
    joint: bool | None, row: CastPlan | None, col: CastPlan
) -> None:
    def facts(tensors: tuple[Tensor, ...]) -> list[object]:
        return [(t.shape, t.dtype, t.stride()) for t in tensors]

    for tokens, features in ((1, 1), (150, 40), (0, 8), (6, 0)):
        op, args = call(joint, row, col, tokens, features)
        real = op(*args)
        meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        assert facts(meta) == facts(real)
        with FakeTensorMode() as fake:
            faked = op(*(fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        assert facts(faked) == facts(real)


@source
def test_a_compiled_graph_serves_all_offsets_and_tokens(joint: bool | None) -> None:
    """Two graphs at most: one of the first number of tokens, one of any; none for other offsets."""
    from torch._dynamo.testing import CompileCounter

    counts = CompileCounter()

    def columns(both: Tensor, offs: Tensor) -> Outputs:
        gate, up = both.chunk(2, 1)
        return by_op([gate, up] if joint is None else [up, gate, up], joint, offs, ROWS, ROWS)

    compiled = torch.compile(columns, backend=counts, fullgraph=True)
    for sizes, graphs in [([30, 0, 70], 1), ([1, 99, 0], 1), ([50, 6, 7], 2), ([0, 1, 180], 2)]:
        both, offs = torch.randn(sum(sizes), 48, device=DEVICE), ends(sizes, DEVICE)
        assert_same(compiled(both, offs), columns(both, offs))
        assert counts.frame_count == graphs


def test_no_gradient_flows() -> None:
    x, offs = torch.randn(4, 8, requires_grad=True), ends([4])
    for t in ops.swiglu_quantize_grouped(x, x, offs, *ROWS, *ROWS):
        assert t.grad_fn is None or "NotImplemented" in str(t.grad_fn.name())


def test_ops_refuse_what_they_do_not_take() -> None:
    """In words, for real and for fake tensors alike; the others are ``quantize_grouped``'s."""
    x, offs, casts = torch.randn(6, 8), ends([2, 4]), (*ROWS, *ROWS)
    forward, backward = ops.swiglu_quantize_grouped, ops.swiglu_backward_quantize_grouped
    refused: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (forward, (x[0], x[0], offs, *casts)),
        (forward, (x.double(), x.double(), offs, *casts)),
        (forward, (x, x.bfloat16(), offs, *casts)),
        (forward, (x, x[:, 1:], offs, *casts)),
        (backward, (x[:2], x, x, offs, True, *casts)),
        (backward, (x, x, x, offs.long(), True, *casts)),
        (forward, (x, x, offs, *NONE, (1, 96), *ROWS[1:])),
        (backward, (x, x, x, offs, False, (1, FULL), None, None, *ROWS)),
    ]
    messages = []
    for op, args in refused:
        with pytest.raises(ValueError) as error:
            op(*args)
        messages.append(str(error.value))
        with pytest.raises(ValueError) as of_meta:
            op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        assert str(of_meta.value) == messages[-1]
    assert_expected_inline(
        "\n".join(messages),
        """\
x has shape (8,); groups are rows of a matrix [tokens, features], so flatten the leading dimensions
x is torch.float64; a cast takes torch.bfloat16, torch.float16, torch.float32, so convert it first
inputs differ: gate torch.float32 (6, 8), up torch.bfloat16 (6, 8); bring them to one shape and dtype
inputs differ: gate torch.float32 (6, 8), up torch.float32 (6, 7); bring them to one shape and dtype
inputs differ: grad torch.float32 (2, 8), gate torch.float32 (6, 8), up torch.float32 (6, 8); bring them to one shape and dtype
offs is torch.int64 of shape (2,); it must be torch.int32 of shape (groups,), with where each group's rows end
block_t (1, 96) would cross groups, which start at multiples of 128 columns; give FULL or a divisor of that along tokens
block=[1, -1], dtype=None, scale_mode=None: a layout takes all three, or three Nones to be left out""",  # noqa: E501
    )


# ------------------------------------------------------------------------------------ machine code


@pytest.mark.parametrize("target", targets("fused groups"))
@triton
def test_machine_code(target: str) -> None:
    """Compiled for GPUs that are not here: wide accesses, hardware conversions, nothing in scratch,
    no fence around the atomics."""
    found = machine_code("cross_compile.py", "--fused-grouped", target)
    assert {k["kernel"] for k in found} == {
        "group_tile_kernel", "group_rows_kernel", "group_amax_kernel"
    }  # fmt: skip
    for kernel in found:
        assert kernel["scratch"] == kernel["fences"] == 0, kernel
        # Two programs a multiprocessor are worth a few values put aside.
        tiles = kernel["kernel"] == "group_tile_kernel" and kernel["of"] != "swiglu"
        assert kernel["spills"] <= (16 if tiles else 0), kernel
        assert kernel["stack_pointer_reads"] == 0, kernel
        assert kernel["shared"] <= 64 * 1024, kernel
        rows = kernel["kernel"] == "group_rows_kernel"
        # What takes these amaxes is not the groups': rows that are not held, and all of them.
        atomic = {"row": rows and kernel["of"] != "swiglu", "tensor": not rows}
        atomics = kernel["kernel"] != "group_tile_kernel" and kernel["layouts"] == "dual"
        assert bool(kernel["atomics"]) == (atomics and atomic.get(kernel["kind"], False)), kernel
        if kernel["kernel"] == "group_tile_kernel":
            # All but the search for the tile's group, and scales and amaxes.
            assert kernel["wide_loads"] >= 0.4 * kernel["loads"], kernel
            assert kernel["conversions"] >= 8, kernel
            if kernel["kind"] != "mx":
                assert kernel["wide_stores"] >= 0.5 * kernel["stores"], kernel
