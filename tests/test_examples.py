"""The short examples, at smoke size: that they run, and that what they tell is so."""

import inspect
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import float8
from float8.dispatch.table import HANDLERS
from float8.testing import needs, sqnr

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import extend_dispatch
import fnuz_corruption
import quickstart
from data import Text

DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """What an example adds to the dispatch table is gone after it."""
    before = dict(HANDLERS)
    yield
    HANDLERS.clear()
    HANDLERS.update(before)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


# ---- quickstart.py ----


def code_lines(function: Any) -> int:
    """Lines of a function's body: no docstring, no blank lines."""
    source = inspect.getsource(function).partition('"""\n')[2]
    return sum(bool(line.strip()) for line in source.splitlines())


def test_fifteen_lines() -> None:
    assert code_lines(quickstart.train) + code_lines(quickstart.part_1) == 15


@pytest.mark.parametrize("device", DEVICES)
def test_quickstart(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "16", "--device", device, "--backend", "aot_eager"]
    result = quickstart.main(flags)
    part_2, said = result["part_2"], capsys.readouterr().out

    for losses in (result["part_1"], part_2["trained"]):
        assert losses[0] > 5.4 and statistics.fmean(losses[-5:]) < 3.4, losses
    adapted = part_2["adapted"]
    assert statistics.fmean(adapted[-5:]) < statistics.fmean(adapted[:5]), adapted

    frozen = part_2["layer"].both
    assert isinstance(frozen, float8.Float8TrainingTensor) and frozen.grad is None
    assert frozen.qdata.untyped_storage().nbytes() == frozen.numel()
    assert part_2["unchanged"] and part_2["layer"].up.weight.abs().max() > 0

    assert "1 converted (1 Float8Linear, 0 Float8Weight), 1 skipped" in said
    assert "1 of 2 in FP8, 0 of them never run" in said
    assert "It is a Float8Weight; the state dict holds plain tensors:" in said
    assert "'2.both': 'Tensor'" in said and "bytes unchanged" in said


# ---- extend_dispatch.py ----


@pytest.mark.parametrize("device", DEVICES)
def test_extend_dispatch(device: str) -> None:
    result = extend_dispatch.main(["--device", device, "--backend", "aot_eager"])
    assert_expected_inline(
        result["before"],
        "aten.flip.default has no handler for a Float8TrainingTensor (shape (64, 128), e4m3fn, "
        "block (1, 128)). Call .dequantize() first, or give the op a handler with "
        "float8.implements.",
    )
    assert_expected_inline(
        result["refusal"], "aten.flip.default along [0]: blocks (48, 128) would be cut"
    )
    assert torch.equal(result["compiled"], result["eager"])

    torch.manual_seed(0)
    x = torch.randn(64, 128, device=device, requires_grad=True)
    w = torch.randn(96, 128, device=device)
    y = F.linear(x, w)
    truth = torch.cat([y, y.flip(0)])
    (grad,) = torch.autograd.grad(truth.sum(), x)
    assert sqnr(result["eager"], truth) > 25 and sqnr(result["grad"], grad) > 25


@pytest.mark.parametrize("scale_mode", ["fp32", "e8m0_rceil"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block, dims", [((1, 32), (0,)), ((1, -1), (0, 1)), ((-1, -1), (-1,))])
@pytest.mark.parametrize("device", DEVICES)
def test_flip_flips(device: str, block: Any, dims: Any, format: Any, scale_mode: str) -> None:
    x8 = float8.quantize(torch.randn(6, 64, device=device), block, format, scale_mode)
    extend_dispatch.add_flip()
    assert torch.equal(x8.flip(dims).dequantize(), x8.dequantize().flip(dims))


# ---- fnuz_corruption.py ----


def small_text(device: str = "cpu") -> Text:
    return Text.load(None, fnuz_corruption.SEQ_LEN, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_fnuz_corruption(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_matplotlib: None
) -> None:
    out = tmp_path / "x.png"
    result = fnuz_corruption.main(["--steps", "12", "--out", str(out), "--device", device])
    runs, said = result["runs"], capsys.readouterr().out
    quality = {name: statistics.fmean(run.sqnrs) for name, run in runs.items()}
    loss = {name: fnuz_corruption.last(run.losses) for name, run in runs.items()}

    assert quality["fp32"] > 80  # the same numbers, but for a GPU's order of sums
    assert quality["c"] > 25
    assert 4 < quality["a"] < quality["c"] - 15
    assert quality["b, no 0x80"] < 6 < quality["a"]
    assert abs(loss["c"] - loss["fp32"]) < 0.02
    assert loss["a"] > loss["fp32"] + 0.03 and loss["b, no 0x80"] > loss["fp32"] + 0.1
    assert runs["b"].died and 0 < runs["b"].spoiled < 1e-3
    assert not any(run.died for name, run in runs.items() if name != "b")
    assert 0.02 < runs["a"].spoiled < 0.4

    assert result["plot"] is None and not out.exists()
    assert "matplotlib is not installed" in said and "changed 0 of 8192 values" in said
    assert "a: nothing is raised." in said and "the loss is NaN in step" in said


def test_fnuz_refusals() -> None:
    refused = fnuz_corruption.refusals(torch.device("cpu"))
    assert_expected_inline(
        "\n".join(f"{asked}: {text}" for asked, text in refused.items()),
        "b: e4m3fn times e4m3fnuz: aten.mm.default of shapes (64, 128) and (128, 96): e4m3fn times "
        "e4m3fnuz mixes the fn and fnuz flavours, whose bytes mean different values; bring one "
        "over with float8.convert_format\n"
        "b: bytes seen as the other flavour: aten.view.dtype has no handler for a "
        "Float8TrainingTensor (shape (64, 128), e4m3fn, block (1, FULL)). Call .dequantize() "
        "first, or give the op a handler with float8.implements.\n"
        "b: a cast to the other flavour: aten._to_copy.default on a Float8TrainingTensor of shape "
        "(64, 128) and block (1, FULL): it cannot become torch.float8_e4m3fnuz, only "
        "torch.bfloat16, torch.float16, torch.float32. Call .dequantize() first, or give the op "
        "another handler with float8.implements.\n"
        "b: both flavours in one tensor: aten.cat.default on a Float8TrainingTensor of shape "
        "(64, 128) and block (1, FULL): its parts differ in format, block, scale dtype or "
        "orig_dtype, or one is high precision. Call .dequantize() first, or give the op another "
        "handler with float8.implements.\n"
        "a: scales from the data, but for 448: scale_mode='fp32' and a given scale exclude each "
        "other; pass one of them",
    )
    with pytest.raises(AssertionError, match="accepted what it should refuse"):
        fnuz_corruption.refusal(lambda: None)


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_cast_is_wrong(device: str) -> None:
    """With a right cast the example's linear computes what float8 does: it is a fair comparison."""

    def right(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fmt = float8.E4M3FNUZ
        scale = (x.abs().amax(-1, keepdim=True) / fmt.max).clamp(min=2.0**-126)
        data = (x * (1 / scale)).clamp(-fmt.max, fmt.max).to(fmt.dtype)
        return data.float() * scale, torch.zeros_like(x, dtype=torch.bool)

    text = small_text(device)
    ours = fnuz_corruption.train("ours", fnuz_corruption.with_cast(right), text, 2)
    with float8.assume_device("gfx942"):
        theirs = fnuz_corruption.train("float8", float8.convert, text, 2)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)
    assert ours.sqnrs == pytest.approx(theirs.sqnrs, abs=0.5)
    assert ours.spoiled == 0


def test_mistakes_do_what_they_say() -> None:
    x = torch.tensor([[448.0, 300.0, -240.0, 96.0, -1e-4, 0.0]])  # the scale is 1
    values, spoiled = fnuz_corruption.saturated(x)
    assert values.tolist() == [[240.0, 240.0, -240.0, 96.0, 0.0, 0.0]]
    assert spoiled.tolist() == [[True, True, False, False, False, False]]
    values, spoiled = fnuz_corruption.misread(x)
    assert values[:, :4].tolist() == [[224.0, 144.0, -120.0, 48.0]] and values[0, 5] == 0
    assert values[0, 4].isnan() and spoiled.tolist() == [[False] * 4 + [True, False]]
    values, _ = fnuz_corruption.misread_without_nan(x)
    assert values.tolist() == [[224.0, 144.0, -120.0, 48.0, 0.0, 0.0]]


def test_fnuz_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {
        name: fnuz_corruption.Run(name, [5.0, 4.0], [20.0, 10.0])
        for name in ("fp32", "a", "b", "b, no 0x80", "c")
    }
    runs["b"] = fnuz_corruption.Run("b", [float("nan")], [float("nan")])
    fnuz_corruption.plot(runs, tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("example", [quickstart, fnuz_corruption, extend_dispatch])
def test_help_and_bad_flags(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0 and f"python examples/{example.__name__}.py" in (
        capsys.readouterr().out
    )
    if example is not extend_dispatch:
        with pytest.raises(SystemExit):
            example.main(["--steps", "0"])
        assert "--steps 0: it must be at least 1" in capsys.readouterr().err
    if example is fnuz_corruption:
        with pytest.raises(SystemExit):
            example.main(["--data", "/nowhere"])
        assert "there is no such file or folder" in capsys.readouterr().err
