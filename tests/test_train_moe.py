"""The mixture-of-experts training example: what it has of its own. The rest is train_gpt.py's, and
its tests'."""

import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_gpt
import train_moe

import float8
from float8 import RECIPES, baseline

SIZES = (
    "--layers 2 --dim 32 --heads 2 --hidden 24 --experts 4 --top-k 2 --shared 32 --seq-len 32 "
    "--batch-size 4 --warmup 2 --lr 1e-2"
)
DECIDED = ("step", "loss", "lr", "grad_norm")  # what a row holds besides its speed


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def train(out: Path, flags: str) -> dict[str, Any]:
    made = [*SIZES.split(), "--device", "cpu", "--out", str(out), *flags.split()]
    return train_moe.main(made)["runs"]  # type: ignore[return-value]


def decided(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in DECIDED) for row in record["rows"]]


def micro() -> train_moe.MoEGPT:
    config = train_moe.MoEConfig(2, 32, 2, 24, experts=4, top_k=2, shared=32)
    return train_moe.MoEGPT(config)


def test_recipes_share_weights_and_batches_and_experts_run_in_fp8(tmp_path: Path) -> None:
    runs = train(tmp_path, f"--steps 8 --recipe bf16 {' '.join(RECIPES)}")
    losses = {recipe: [row["loss"] for row in run["rows"]] for recipe, run in runs.items()}
    for recipe, run in runs.items():
        # 4 of attention, 3 of the experts, 3 of the shared one in each block; routers and head.
        assert run["summary"]["fp8_layers"] == (0 if recipe == "bf16" else 20)
        assert run["summary"]["all_layers"] == 23
        assert "0 of them never run" in run["summary"]["layers"]
        assert losses[recipe][0] == pytest.approx(losses["bf16"][0], rel=1e-3)
        assert abs(run["summary"]["loss"] / runs["bf16"]["summary"]["loss"] - 1) < 0.02
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.5
    assert len({run["rows"][1]["grad_norm"] for run in runs.values()}) == len(runs)


def test_the_recorded_losses_are_within_two_percent() -> None:
    """The mean of the last 20 of 100 steps, FN and FNUZ."""
    last = {
        name: statistics.fmean(baseline.load(name)["losses"][-20:])
        for name in baseline.NAMES
        if name.startswith("moe-")
    }
    assert len(last) == 11
    gaps = {name: loss / last["moe-bf16"] - 1 for name, loss in last.items()}
    assert max(map(abs, gaps.values())) < 0.02, gaps


def test_an_assumed_device_changes_the_numerics(tmp_path: Path) -> None:
    fn, fnuz = (
        train(tmp_path / name, f"--steps 2 --recipe rowwise {flag}")["rowwise"]
        for name, flag in (("fn", ""), ("fnuz", "--assume-device gfx942"))
    )
    assert decided(fn) != decided(fnuz)
    assert fn["rows"][0]["loss"] == pytest.approx(fnuz["rows"][0]["loss"], rel=1e-3)


def test_deterministic_mode_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "a", "--steps 4 --recipe mxfp8")["mxfp8"]
    # The mode also fills fresh memory with NaN: nothing may read what nothing wrote.
    strict = train(tmp_path / "b", f"--steps 2 --recipe mxfp8 --deterministic --save {tmp_path}/c")
    assert decided(strict["mxfp8"]) == decided(whole)[:2]
    more = train(tmp_path / "b", f"--steps 4 --recipe mxfp8 --resume {tmp_path}/c")
    assert decided(more["mxfp8"]) == decided(whole)


def test_micro_batches_share_the_casts_of_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--steps 2 --layers 1 --recipe rowwise --accumulate 2"
    cached = train(tmp_path, flags)["rowwise"]
    monkeypatch.setattr(train_gpt, "weights_cast_once", lambda *args: contextlib.nullcontext())
    assert decided(train(tmp_path, flags)["rowwise"]) == decided(cached)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--steps 2 --recipe rowwise"
    eager = train(tmp_path, flags)["rowwise"]
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_block(self, backend="aot_eager", **options),
    )
    compiled = train(tmp_path, f"{flags} --compile")["rowwise"]
    for got, expected in zip(decided(compiled), decided(eager), strict=True):
        # Routers' sums are in another order, and Adam's first steps go by the signs of gradients.
        assert got == pytest.approx(expected, rel=2e-3)


def test_balance_is_in_the_loss_that_is_trained_alone() -> None:
    model, tokens = micro(), torch.randint(256, (3, 16))
    loss = model(tokens, tokens)
    with torch.no_grad():
        held_out = model(tokens, tokens)
        torch.testing.assert_close(
            held_out, torch.nn.functional.cross_entropy(model(tokens).mT, tokens)
        )
    assert 0.01 <= (loss - held_out).item() < 0.04
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_flops_count_what_a_token_meets() -> None:
    D, F, S, E, K, V, T = 32, 24, 32, 4, 2, 256, 20
    model = micro()
    met = 4 * D * D + K * 3 * D * F + 3 * D * S + E * D
    assert model.flops_per_token(T) == 6 * (2 * met + D * V) + 12 * 2 * D * T
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(V, (1, T)), torch.randint(V, (1, T))).backward()
    # PyTorch's own count of products: of attention on a CPU it knows nothing, nor of the experts'.
    experts = T * 6 * 2 * K * 3 * D * F
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    assert products in (T * (model.flops_per_token(T) - 12 * 2 * D * T) - x for x in (0, experts))


@pytest.mark.parametrize("name", train_moe.PRESETS)
def test_presets_make_models(name: str) -> None:
    preset = train_moe.PRESETS[name]
    with torch.device("meta"):
        model = preset.model()
        float8.convert(model)
        loss = model(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64))
    assert loss.shape == ()
    assert all(line.last_run for line in float8.summary(model).layers if line.recipe)


def test_bad_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        ("--top-k 5", "train_moe.py: error: top_k=5 of 4 experts; it must be 1 to 4"),
        ("--dim 36 --heads 4", "a width of 36 does not divide into 4 heads of even width"),
        ("--balance 0", "argument --balance: 0 is not above 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            train(tmp_path, flags)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


def test_the_log_says_what_was_trained(tmp_path: Path) -> None:
    train(tmp_path, "--steps 1 --layers 1 --recipe bf16")
    header = json.loads((tmp_path / "bf16.jsonl").read_text().splitlines()[0])
    sizes = {key: header["settings"][key] for key in ("experts", "top_k", "shared", "balance")}
    assert sizes == {"experts": 4, "top_k": 2, "shared": 32, "balance": 0.01}
