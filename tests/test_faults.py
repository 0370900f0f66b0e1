"""What went wrong elsewhere and must not here, where no other file asks.

Each test is named by what would go wrong; the docstring says who reported it. README.md beside this
file maps every kind of fault to its tests, and the last tests here hold that page to the code.
"""

from __future__ import annotations

import ast
import copy
import gc
import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    BLOCKWISE,
    E4M3FN,
    E5M2,
    FULL,
    MXFP8,
    RECIPES,
    ROWWISE,
    Float8Linear,
    Recipe,
    cached_weights,
    ops,
    quantize,
)
from float8.scaling import Block, scale_shape
from float8.testing import (
    assert_same_bytes,
    deterministic,
    needs,
    relative_error,
    saved_bytes,
    sqnr,
)

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "float8" / "kernels"
NAMED = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
GRANULARITIES: dict[str, tuple[Block, str]] = {
    "tensorwise": ((FULL, FULL), "fp32"),
    "rowwise": ((1, FULL), "fp32"),
    "blockwise": ((1, 128), "fp32"),
    "square": ((128, 128), "fp32"),
    "mxfp8": ((1, 32), "e8m0_rceil"),
}


@pytest.fixture(autouse=True)
def _cublas_may_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, torch refuses cuBLAS under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def mlp(recipe: Recipe, device: str = "cpu", features: int = 64) -> nn.Sequential:
    return nn.Sequential(
        Float8Linear(features, 96, device=device, recipe=recipe),
        nn.GELU(),
        Float8Linear(96, features, bias=False, device=device, recipe=recipe),
    )


def step(
    model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Output, gradient of x and gradients of the parameters of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = model(x) if call is None else call(x)
    y.square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        assert_same_bytes(left, right)


# --- 32-bit offsets


def kernels() -> dict[str, ast.FunctionDef]:
    """The functions of device code that Triton compiles."""
    found = {}
    for path in KERNELS.glob("*_triton.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                if ast.unparse(node.decorator_list[0]).startswith("triton.jit"):
                    found[f"{path.name}::{node.name}"] = node
    return found


def narrow_products_of_strides(kernel: ast.FunctionDef) -> list[str]:
    """Products with a stride of the input that are computed in 32 bits: a stride below 2^31 arrives
    as int32, so its other factor has to be int64."""
    wide: set[str] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            wide |= {ast.unparse(t) for t, v in pairs if "int64" in ast.unparse(v)}

    def is_wide(node: ast.expr) -> bool:
        named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return bool(named & wide) or "int64" in ast.unparse(node)

    return [
        ast.unparse(node)
        for node in ast.walk(kernel)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(re.fullmatch(r"stride_\w+", ast.unparse(side)) for side in (node.left, node.right))
        and not is_wide(node)
    ]


def test_the_search_for_32_bit_offsets_finds_them() -> None:
    source = """
        def kernel(x, stride_m):
            r, e = tl.program_id(0), tl.program_id(1).to(tl.int64)
            a = x + r * stride_m + 2 * stride_m
            b = x + e * stride_m + r[:, None].to(tl.int64) * stride_m
        """
    (kernel,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(kernel, ast.FunctionDef)
    assert set(narrow_products_of_strides(kernel)) == {"r * stride_m", "2 * stride_m"}


def test_no_kernel_computes_an_offset_in_32_bits() -> None:
    """Nor takes a number of elements, which has no 32 bits to arrive in. Reported as
    pytorch/ao#4016, unslothai/unsloth#6884 and PrimeIntellect-ai/prime-rl#2453."""
    assert len(kernels()) > 3
    for name, kernel in kernels().items():
        assert not narrow_products_of_strides(kernel), name
        counts = [a.arg for a in kernel.args.args if re.search(r"numel|count|size", a.arg)]
        assert not counts, name


FAR_ROWS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from float8 import E4M3FN, FULL
from float8.kernels.quantize import CastPlan, quantize
from float8.kernels.quantize_triton import quantize_layouts

stride, rows = 2**30, 4  # the fourth row begins 3 * 2^30 elements behind the first
x = torch.empty(3 * stride + 32, dtype=torch.float16).as_strided((rows, 32), (stride, 1))
x.copy_(torch.exp2(torch.arange(rows * 32).reshape(rows, 32) % 7 - 3.0))
for block in ((1, 128), (1, FULL), (FULL, FULL)):
    plan = CastPlan(block, E4M3FN.dtype, "pow2")
    row, row_scale, col, col_scale = quantize_layouts(x, plan, plan)
    for got, want in zip((row, row_scale), quantize(x, *plan)):
        assert torch.equal(got.float(), want.float()), block
    for got, want in zip((col, col_scale), quantize(x.t(), *plan)):
        assert torch.equal(got.float(), want.float()), block
print("equal")
"""


def test_rows_two_gigabytes_apart_are_not_read_elsewhere() -> None:
    """In Triton's interpreter, whose integers wrap as those of a GPU do; of the 6 GB that the view
    spans, only the pages it touches are taken. Reported as thu-ml/SageAttention#390."""
    pytest.importorskip("triton")
    if sys.platform != "linux":
        pytest.skip("memory that nobody touches is taken")
    # A process of its own: Triton reads the variable once, and a wrong address ends the process.
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, "-c", FAR_ROWS], env=environment, capture_output=True, text=True
    )
    if "DefaultCPUAllocator" in done.stderr:
        pytest.skip("this machine does not lend memory that it has not got")
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def ends(x: Tensor, dim: int = 0) -> Tensor:
    """The first 128 and the last 128 along a dimension."""
    return torch.cat([x.narrow(dim, 0, 128), x.narrow(dim, x.shape[dim] - 128, 128)], dim)


def assert_ends(
    big: tuple[Tensor, Tensor], small: tuple[Tensor, Tensor], dim: int, block: Block
) -> None:
    """A cast of a matrix whose other rows or columns are zero, and one of its ends."""
    assert_same_bytes(ends(big[0], dim), small[0])
    scale, want = (s.contiguous() for s in (big[1], small[1]))
    if block[dim] != FULL:  # else zeros change no scale
        count = want.shape[dim] // 2
        assert_same_bytes(scale.narrow(dim, 0, count), want.narrow(dim, 0, count))
        scale, want = (s.narrow(dim, s.shape[dim] - count, count) for s in (scale, want))
    assert_same_bytes(scale, want)


@pytest.mark.parametrize("of_columns", list(GRANULARITIES))
@pytest.mark.parametrize("of_rows", ["rowwise", "blockwise", "square"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs("cuda"))])
def test_the_last_rows_of_more_than_two_to_the_31_elements(
    of_rows: str, of_columns: str, device: str
) -> None:
    """Reported as pytorch/ao#4016, thu-ml/SageAttention#390 and ROCm/aiter#452."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    x = torch.zeros(2**20 + 128, 2048, dtype=torch.bfloat16, device=device)
    x[:128].normal_()
    x[-128:].normal_()
    (block, mode), (block_t, mode_t) = GRANULARITIES[of_rows], GRANULARITIES[of_columns]
    row, col = (block, E4M3FN.dtype, mode), (block_t, E4M3FN.dtype, mode_t)
    data, scale, data_t, scale_t = torch.ops.float8.quantize_dual(x, *row, *col)
    small = ends(x).cpu()
    assert_ends((data, scale), ops.quantize(small, *row), 0, block)
    assert_ends((data_t, scale_t), ops.quantize(small.t(), *col), 1, block_t)
    assert not data[128:-128].view(torch.uint8).any()


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs("cuda"))])
def test_the_last_rows_of_swiglu_of_more_than_two_to_the_32_elements(
    name: str, device: str
) -> None:
    """Of halves of one tensor; against the same kernels on the ends alone."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    both = torch.zeros(2**20 + 128, 4096, dtype=torch.bfloat16, device=device)
    both[:128].normal_()
    both[-128:].normal_()
    block, mode = GRANULARITIES[name]
    cast = (block, E4M3FN.dtype, mode)
    data, scale, data_t, scale_t = ops.swiglu_quantize(*both.chunk(2, 1), *cast, *cast)
    want = ops.swiglu_quantize(*ends(both).chunk(2, 1), *cast, *cast)
    assert_ends((data, scale), want[:2], 0, block)
    assert_ends((data_t, scale_t), want[2:], 1, block)
    assert not data[128:-128].view(torch.uint8).any()


# --- wrong results inside kernels


def test_no_kernel_transposes_bytes() -> None:
    """Only words of four, and float32 sums: a transposed FP8 tile was seen to lose bytes. Reported
    as mlc-ai/pith-train#74."""
    transposed = [
        ast.unparse(call.args[0])
        for kernel in kernels().values()
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.trans", "tl.permute")
    ]
    wide = ("pack(", "tl.reshape(v,")
    assert transposed and all(t.startswith(wide) for t in transposed), transposed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(96, 160), (1000, 48), (136, 200), (1, 300), (300, 1)], ids=str)
@pytest.mark.parametrize("name", list(GRANULARITIES))
def test_a_tall_or_wide_matrix_is_not_stored_past_its_edges(
    name: str, shape: tuple[int, int], device: str
) -> None:
    """Both layouts, and what lies right behind them. Reported as pytorch/ao#1516 (a store mask with
    swapped offsets), pytorch/ao#4634 (scales read past their end)."""
    block, mode = GRANULARITIES[name]
    x = torch.randn(shape, device=device)
    with deterministic():  # what nobody writes is NaN
        data, scale, data_t, scale_t = torch.ops.float8.quantize_dual(
            x, block, E4M3FN.dtype, mode, block, E5M2.dtype, mode
        )
    for got, x_cpu, dtype in (
        ((data, scale), x.cpu(), E4M3FN.dtype),
        ((data_t, scale_t), x.cpu().t(), E5M2.dtype),
    ):
        want, want_scale = ops.quantize(x_cpu, block, dtype, mode)
        assert_same_bytes(got[0], want)
        assert_same_bytes(got[1], want_scale)
        assert tuple(got[1].shape) == scale_shape(x_cpu.shape, block)


@pytest.mark.parametrize("device", DEVICES)
@NAMED
def test_a_wide_contraction_is_not_less_exact(recipe: Recipe, device: str) -> None:
    """Reported as pytorch/ao#4104: 7 dB, where casts to e4m3 leave 28."""
    x, w = torch.randn(4, 3584, device=device), torch.randn(640, 3584, device=device)
    assert sqnr(float8.linear(x, w, recipe=recipe), x.double() @ w.double().t()) > 27.5


def test_no_column_of_a_weight_gradient_is_dead() -> None:
    """Reported as pytorch/pytorch#188841: every fourth column zero, in compiled code, for a wgrad
    of 16 x 16 x 32."""
    layer = Float8Linear(32, 16)
    x = torch.randn(16, 32)
    expected = step(layer, x)
    got = step(layer, x, torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert_all_same(got, expected)
    assert (got[2] != 0).all()


def test_a_scale_that_is_no_power_of_two_is_not_cut_to_one() -> None:
    """Where blocks are those of MX, too: float32 scales stay what they are. Reported as
    sgl-project/sglang#39193."""
    x, scale = torch.randn(4, 64), torch.full((4, 2), 0.3)
    x8 = quantize(x, (1, 32), scale=scale)
    assert_same_bytes(x8.scale, scale)
    w8 = quantize(torch.randn(8, 64), (1, 32))
    truth = x8.dequantize().double() @ w8.dequantize().double().t()
    assert relative_error(x8 @ w8.t(), truth) < 1e-6


def test_exact_scales_are_not_rounded_to_powers_of_two() -> None:
    """Only where a recipe says so, and it costs accuracy. Reported as
    PrimeIntellect-ai/prime-rl#3112."""
    x = torch.randn(64, 512)
    exact, pow2 = (quantize(x, (1, 128), scale_mode=m) for m in ("fp32", "pow2"))
    assert (exact.scale.log2() % 1 != 0).all()
    assert (pow2.scale.log2() % 1 == 0).all()
    assert sqnr(exact.dequantize(), x) > sqnr(pow2.dequantize(), x)
    for recipe in (BLOCKWISE, ROWWISE, MXFP8):
        mode = "e8m0_rceil" if recipe is MXFP8 else "fp32"
        assert str(recipe).count(mode) == 6


# --- activation checkpointing, saved memory


def live_bytes() -> int:
    """Bytes of all storages that Python can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for obj in gc.get_objects():
        if type(obj) in (Tensor, nn.Parameter):  # of wrappers, the parts
            try:
                storage = obj.untyped_storage()
            except NotImplementedError:  # sparse, or functorch's, of other tests: it has none
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@NAMED
def test_layers_do_not_hold_memory_after_backward(recipe: Recipe) -> None:
    """Ten equal layers keep ten equal amounts for backward, and nothing after it but gradients.
    Reported as NVIDIA/TransformerEngine#2681."""
    layers = nn.Sequential(*(Float8Linear(64, 64, recipe=recipe) for _ in range(10)))
    y, kept = torch.randn(32, 64).requires_grad_(), []
    with saved_bytes() as total:
        for layer in layers:
            y = layer(y)
            kept.append(total())
    assert len({after - before for before, after in itertools.pairwise(kept)}) == 1
    del y
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Kept:
        alive.add(held := Kept(tensor))
        return held

    def train() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss = layers(torch.randn(32, 64)).square().mean()
        assert len(alive) >= 10
        loss.backward()

    train()  # makes the gradients
    before = live_bytes()
    for _ in range(3):
        train()
        assert not alive
    assert live_bytes() == before
    with cached_weights(layers):
        train()
        assert live_bytes() > before
    assert live_bytes() == before


def test_checkpointed_blocks_do_not_keep_more_than_bf16_does() -> None:
    """Reported as pytorch/ao#3349."""
    fp8 = nn.ModuleList(mlp(ROWWISE).bfloat16() for _ in range(8))
    plain = copy.deepcopy(fp8)
    for block in plain:
        float8.revert(block)

    def kept(blocks: nn.ModuleList) -> int:
        y = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        with saved_bytes() as total:
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False)
        return total()

    assert kept(fp8) <= kept(plain)


@NAMED
def test_a_cached_weight_is_not_overwritten_while_a_graph_waits(recipe: Recipe) -> None:
    """Three micro-batches, one forward ahead. Reported as NVIDIA/TransformerEngine#539."""
    model = mlp(recipe)
    batches = [torch.randn(n, 64) for n in (16, 7, 33)]

    def train(losses: Callable[[], None]) -> list[Tensor]:
        model.zero_grad()
        losses()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def in_turn() -> None:
        for x in batches:
            model(x).square().sum().backward()

    def one_ahead() -> None:
        with cached_weights(model):
            waiting = model(batches[0]).square().sum()
            for x in batches[1:]:
                following = model(x).square().sum()
                checkpoint(model, x, use_reentrant=False)  # a recomputation that nobody asks for
                waiting.backward()
                waiting = following
            waiting.backward()

    assert_all_same(train(one_ahead), train(in_turn))


@pytest.mark.parametrize("wrapped", [False, True], ids=["Float8Linear", "Float8Weight"])
def test_a_checkpoint_does_not_grow_with_the_steps(wrapped: bool) -> None:
    """Reported as NVIDIA/TransformerEngine#231."""
    model: nn.Module = mlp(MXFP8, features=32)
    if wrapped:
        float8.revert(model)
        float8.weight.wrap_parameter(model[0], "weight")
        float8.weight.wrap_parameter(model[2], "weight")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, sizes = torch.randn(8, 32), {}
    for i in range(1, 201):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i in (1, 200):
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            sizes[i] = file.tell(), sorted(model.state_dict())
    assert sizes[1] == sizes[200]


# --- determinism


@NAMED
def test_the_order_of_tokens_does_not_change_their_numbers(recipe: Recipe) -> None:
    """Outputs and gradients of permuted tokens are the permuted ones: no token's scale depends on
    its neighbours', or, with one scale for all, on their order."""
    x, w, g = torch.randn(35, 64), torch.randn(48, 64, requires_grad=True), torch.randn(35, 48)
    order = torch.randperm(35)

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = float8.linear(x, w, recipe=recipe)
        return (y.detach(), *torch.autograd.grad(y, (x, w), g))  # type: ignore[return-value]

    (y, gx, gw), (moved_y, moved_gx, moved_gw) = run(x, g), run(x[order], g[order])
    assert_same_bytes(moved_y, y[order])
    assert_same_bytes(moved_gx, gx[order])
    if recipe.wgrad is None or recipe.wgrad.a.block[1] == FULL:  # else tokens change their blocks
        assert relative_error(moved_gw, gw) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@NAMED
def test_no_memory_that_nobody_wrote_reaches_a_result(recipe: Recipe, device: str) -> None:
    """Forward and backward, eager and compiled, where torch fills every empty tensor with NaN:
    the bits of the ordinary run, twice. Reported as pytorch/pytorch#137160 (the fill was not
    implemented for FP8), pytorch/torchtitan#597 (gradient norms that differ)."""
    model, x = mlp(recipe, device), torch.randn(35, 64, device=device)
    expected = step(model, x)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with deterministic():
        poisoned = torch.empty(8, dtype=E4M3FN.dtype, device=device)
        assert poisoned.float().isnan().all()  # else this tests nothing
        for run in (None, call):
            assert_all_same(step(model, x, run), expected)
            assert_all_same(step(model, x, run), expected)
    assert_all_same(step(model, x, call), expected)
    assert all(t.isfinite().all() for t in expected)


# --- the page beside this file


def page() -> str:
    return (TESTS / "README.md").read_text()


def named_tests() -> set[tuple[str, str]]:
    """(file, test) of everything that README.md names."""
    return set(re.findall(r"`(test_\w+\.py)::(test_\w+|Test\w+)`", page()))


def test_every_test_that_the_page_names_exists() -> None:
    assert len(named_tests()) > 50
    defined: dict[str, set[str]] = {}
    for file, name in sorted(named_tests()):
        if file not in defined:
            path = TESTS / file
            assert path.exists(), f"README.md names {file}, which is not there"
            tree = ast.walk(ast.parse(path.read_text()))
            defined[file] = {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert name in defined[file], f"README.md names {file}::{name}, which is not there"


def test_the_page_names_every_test_of_this_file() -> None:
    tree = ast.parse(Path(__file__).read_text())
    ours = {
        n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    }
    named = {name for file, name in named_tests() if file == Path(__file__).name}
    about_the_page = {name for name in ours if "page" in name}
    assert ours - named - about_the_page == set()
