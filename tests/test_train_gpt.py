"""The training example: its model, its data, and a micro training of a few steps per promise."""

import contextlib
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import data
import gpt
import report
import train_gpt

from float8.testing import needs

SIZES = "--layers 2 --dim 32 --heads 2 --hidden 48 --seq-len 32 --batch-size 4 --warmup 2 --lr 1e-2"
DECIDED = ("step", "loss", "lr", "grad_norm")  # what a row holds besides its speed


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here; the one test of it undoes this."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def train(out: Path, flags: str) -> dict[str, Any]:
    return train_gpt.main([*SIZES.split(), "--device", "cpu", "--out", str(out), *flags.split()])


def decided(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in DECIDED) for row in rows]


def log_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["model"]


def refusal(capsys: pytest.CaptureFixture[str], out: Path, flags: str) -> str:
    """What the command says, on exit status 2, to flags that it refuses."""
    with pytest.raises(SystemExit) as stopped:
        train(out, flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def micro_gpt() -> gpt.GPT:
    return gpt.GPT(gpt.GPTConfig(layers=2, dim=32, heads=2, hidden=48))


# ---- The model ----


def test_shapes_and_first_loss() -> None:
    tokens = torch.randint(256, (3, 16))
    model = micro_gpt()
    logits = model(tokens)
    assert logits.shape == (3, 16, 256) and logits.dtype == torch.float32
    loss = model(tokens, tokens)
    assert loss.shape == () and abs(loss.item() - math.log(256)) < 0.05
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.mT, tokens))


def test_a_token_changes_no_logits_before_it() -> None:
    model, tokens = micro_gpt(), torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()  # it and all later ones see it


def test_rotary_products_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16)

    def product(m: int, n: int) -> torch.Tensor:
        angles = gpt.rope_angles(torch.tensor([m, n]), width=16)
        return (gpt.rotate(q, angles[:1]) * gpt.rotate(k, angles[1:])).sum()

    torch.testing.assert_close(product(3, 8), product(40, 45), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product(7, 7), (q * k).sum(), rtol=1e-4, atol=1e-4)
    assert abs(product(3, 8) - product(3, 9)) > 1e-3


def test_flops_count_every_multiplied_weight_and_attention() -> None:
    D, F, V, T = 32, 48, 256, 20
    model = micro_gpt()
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(V, (1, T)), torch.randint(V, (1, T))).backward()
    assert model.flops_per_token(T) == 6 * (2 * (4 * D * D + 3 * D * F) + D * V) + 12 * 2 * D * T
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # PyTorch's own count of the products of weights; it does not know the CPU's attention.
    assert products == T * (model.flops_per_token(T) - 12 * 2 * D * T)


def test_shared_keys_and_values_are_those_of_a_repeated_head() -> None:
    shared = gpt.GPT(gpt.GPTConfig(layers=1, dim=32, heads=4, hidden=48, kv_heads=2))
    full = gpt.GPT(gpt.GPTConfig(layers=1, dim=32, heads=4, hidden=48))
    state = shared.state_dict()
    for name in ("blocks.0.attention.wk.weight", "blocks.0.attention.wv.weight"):
        assert state[name].shape == (16, 32)
        state[name] = state[name].view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.randint(256, (2, 16))
    torch.testing.assert_close(shared(tokens), full(tokens))


# ---- The data ----


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("b/c", "three"), ("a.txt", "one"), ("b/a", "two"), (".hidden", "no")):
        (tmp_path / name).write_text(text)
    assert data.read_files(data.files_below(tmp_path)) == b"onetwothree"
    assert data.read_files(data.files_below(tmp_path), limit=5) == b"onetw"


def test_the_library_has_neither_tests_nor_installed_packages() -> None:
    names = {part for path in data.standard_library() for part in path.parts}
    assert {"argparse.py", "json"} <= names
    assert not names & {"test", "tests", "site-packages", "torch"}


def test_batches_follow_from_their_key_and_stay_out_of_validation(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(200)))
    text = data.Text.load(str(tmp_path / "text"), seq_len=8, device=torch.device("cpu"))
    tokens, targets = text.batch("0/5/0", 64, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and targets.max() <= 179
    assert torch.equal(text.batch("0/5/0", 64, 8)[0], tokens)
    assert not torch.equal(text.batch("0/6/0", 64, 8)[0], tokens)
    assert not torch.equal(text.batch("1/5/0", 64, 8)[0], tokens)
    held_out = [tokens for tokens, _ in text.validation_batches(2, 4, 8)]
    assert [t.shape for t in held_out] == [(4, 8)] * 2 and torch.stack(held_out).min() >= 180


# ---- A training ----


def test_recipes_share_weights_batches_and_log_all_of_it(tmp_path: Path) -> None:
    result = train(tmp_path, "--steps 8 --recipe bf16 rowwise mxfp8")
    assert list(result["runs"]) == ["bf16", "rowwise", "mxfp8"] and result["out"] == tmp_path
    logs = {recipe: log_lines(tmp_path / f"{recipe}.jsonl") for recipe in result["runs"]}
    for recipe, (header, *rows, closing) in logs.items():
        assert decided(rows) == decided(result["runs"][recipe]["rows"]) and len(rows) == 8
        assert header["versions"]["torch"] == torch.__version__
        assert header["settings"] | {"recipe": None} == logs["bf16"][0]["settings"] | {
            "recipe": None
        }
        assert closing["summary"]["fp8_layers"] == (0 if recipe == "bf16" else 14)
        assert closing["summary"]["all_layers"] == 15
        assert "lm_head" in closing["summary"]["layers"]
        assert "0 of them never run" in closing["summary"]["layers"]
        # Equal weights and batches: the first loss differs by the rounding of the layers alone.
        assert rows[0]["loss"] == pytest.approx(logs["bf16"][1]["loss"], rel=1e-3)
        assert (
            abs(closing["summary"]["loss"] / result["runs"]["bf16"]["summary"]["loss"] - 1) < 0.02
        )
    first_norms = [rows[1]["grad_norm"] for rows in logs.values()]
    assert len(set(first_norms)) == 3  # and they do differ: three numerics, not one


def test_it_learns_and_the_table_has_the_last_steps(tmp_path: Path) -> None:
    record = train(tmp_path, "--steps 24 --recipe bf16")["runs"]["bf16"]
    losses = [row["loss"] for row in record["rows"]]
    assert max(losses[-4:]) < losses[0] - 1.0
    assert record["summary"]["loss"] == statistics.fmean(losses[4:])
    assert record["summary"]["validation_loss"] < losses[0] - 1.0


def test_assumed_device_is_reported_and_changes_the_numerics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tmp_path / "a", "--steps 3 --recipe rowwise")["runs"]["rowwise"]
    capsys.readouterr()
    fnuz = train(tmp_path / "b", "--steps 3 --recipe rowwise --assume-device gfx942")["runs"][
        "rowwise"
    ]
    assert "FP8: e4m3fnuz and e5m2fnuz; gfx942" in capsys.readouterr().out
    assert fnuz["settings"]["assumed device"] == "gfx942"
    assert decided(plain["rows"]) != decided(fnuz["rows"])
    assert train_gpt.float8.device_profile("cpu").arch == "cpu"  # assumed for the training only


def test_deterministic_mode_gives_the_same_bits(tmp_path: Path) -> None:
    flags = "--steps 2 --layers 1 --recipe tensorwise mxfp8"
    plain = train(tmp_path, flags)["runs"]
    # The mode also fills fresh memory with NaN: nothing may read what nothing wrote.
    strict = train(tmp_path, f"{flags} --deterministic")["runs"]
    assert not torch.are_deterministic_algorithms_enabled()
    for recipe in plain:
        assert decided(strict[recipe]["rows"]) == decided(plain[recipe]["rows"])


def test_micro_batches_add_up_to_the_mean(tmp_path: Path) -> None:
    rows = train(tmp_path, "--steps 1 --recipe bf16 --accumulate 2")["runs"]["bf16"]["rows"]
    halves = []
    text = data.Text.load(None, 32, torch.device("cpu"))
    torch.manual_seed(0)
    model = micro_gpt()
    for micro in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*text.batch(f"0/0/{micro}", 4, 32))
        (loss / 2).backward()
        halves.append(loss.item())
    assert rows[0]["loss"] == pytest.approx(statistics.fmean(halves), rel=1e-6)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert rows[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_cached_weights_of_micro_batches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--steps 3 --recipe blockwise --accumulate 2"
    cached = train(tmp_path, flags)["runs"]["blockwise"]
    monkeypatch.setattr(train_gpt, "weights_cast_once", lambda *_: contextlib.nullcontext())
    assert decided(train(tmp_path, flags)["runs"]["blockwise"]["rows"]) == decided(cached["rows"])


def test_learning_rate() -> None:
    setup = train_gpt.Preset(1, 2, 1, 2, 8, 1, steps=101, warmup=1, lr=1.0)
    rates = [train_gpt.learning_rate(step, setup, "cosine") for step in range(101)]
    assert rates[:2] == [1.0, 1.0] and rates[-1] == pytest.approx(0.1)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert train_gpt.learning_rate(100, setup, "constant") == 1.0


# Dynamo looks at .grad of a block's input and hides the warning, which "error" makes a failure.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = train(tmp_path, "--steps 2 --layers 1 --recipe rowwise")
    compile_block = torch.nn.Module.compile

    def without_inductor(self: torch.nn.Module, **options: Any) -> None:
        assert options == {"fullgraph": True}
        compile_block(self, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", without_inductor)
    compiled = train(tmp_path, "--steps 2 --layers 1 --recipe rowwise --compile")
    assert decided(compiled["runs"]["rowwise"]["rows"]) == decided(eager["runs"]["rowwise"]["rows"])


@needs("cuda")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--compile"])
def test_captured_steps_train_as_launched_ones(tmp_path: Path, flags: str) -> None:
    flags = f"--device cuda --steps 8 --recipe bf16 rowwise {flags}"
    launched = train(tmp_path / "launched", flags)["runs"]
    captured = train(tmp_path / "captured", f"{flags} --cuda-graph")["runs"]
    for recipe, record in captured.items():
        rows = launched[recipe]["rows"]
        for key in DECIDED:
            expected = [row[key] for row in rows]
            assert [row[key] for row in record["rows"]] == pytest.approx(expected, rel=2e-3), key
        assert len({row["loss"] for row in record["rows"]}) == 8


@pytest.mark.parametrize("name", train_gpt.PRESETS)
def test_presets_make_models(name: str) -> None:
    """The shapes of Llama's blocks, where a preset promises them."""
    preset = train_gpt.PRESETS[name]
    config = gpt.GPTConfig(
        preset.layers, preset.dim, preset.heads, preset.hidden, kv_heads=preset.kv_heads
    )
    with torch.device("meta"):
        model = gpt.GPT(config)
    parameters = sum(p.numel() for p in model.blocks.parameters())
    llama = {"1b": 16 * 60_821_504, "8b-layers": 4 * 218_112_000}  # a published model's blocks
    assert parameters == llama.get(name, parameters)
    tokens = preset.batch_size * preset.seq_len
    assert name != "8b-layers" or tokens == 8192
    with torch.device("meta"):
        assert model(torch.zeros(1, preset.seq_len, dtype=torch.int64)).shape[-1] == 256


def test_divergence_stops_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--steps 8 --recipe bf16 rowwise --lr 1e20 --warmup 1 --save {tmp_path} --save-every 1"
    result = train(tmp_path, flags)
    said = capsys.readouterr().out
    for recipe, record in result["runs"].items():
        assert "gradient norm of nan" in record["stopped"] and len(record["rows"]) < 8
        assert f"{recipe}: stopped, {record['stopped']}; try a smaller --lr" in said
        *_, last, closing = log_lines(tmp_path / f"{recipe}.jsonl")
        assert last["grad_norm"] is None and closing["stopped"] == record["stopped"]
        kept = torch.load(tmp_path / f"{recipe}.pt", weights_only=True)["model"]
        assert all(value.isfinite().all() for value in kept.values())


# ---- Stopping and going on ----


def interrupt_at(step: int, how: Callable[[], None]) -> Callable[..., dict[str, Any]]:
    """A train_step that calls `how` at a step of the second recipe."""
    plain = train_gpt.train_step

    def interrupted(run: train_gpt.Run, job: train_gpt.Job) -> dict[str, Any]:
        if run.record["recipe"] == "rowwise" and len(run.record["rows"]) == step:
            how()
        return plain(run, job)

    return interrupted


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "done"),
    [(raise_interrupt, 3), (lambda: signal.raise_signal(signal.SIGINT), 4)],
    ids=["at once", "after the step"],
)
def test_ctrl_c_saves_and_the_resumed_training_is_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: Callable[[], None],
    done: int,
) -> None:
    flags = "--steps 6 --layers 1 --recipe bf16 rowwise mxfp8"
    whole = train(tmp_path / "whole", f"{flags} --save {tmp_path}/whole/saved")["runs"]
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train_step", interrupt_at(3, how))
        with pytest.raises(SystemExit) as stopped:
            train(tmp_path / "parts", flags)
    assert stopped.value.code == 130 and signal.getsignal(signal.SIGINT) is handler
    saved = tmp_path / "parts/checkpoints"
    assert f"--resume {saved}" in capsys.readouterr().out
    assert len(torch.load(saved / "rowwise.pt", weights_only=True)["record"]["rows"]) == done
    assert weights(saved / "bf16.pt") is None and not (saved / "mxfp8.pt").exists()

    resumed = train(tmp_path / "parts", f"{flags} --resume {saved} --save-every 6")["runs"]
    said = capsys.readouterr().out
    assert "bf16: all its 6 steps are done" in said and f"rowwise: going on after {done}" in said
    for recipe in whole:
        assert decided(resumed[recipe]["rows"]) == decided(whole[recipe]["rows"])
        assert (
            resumed[recipe]["summary"]["validation_loss"]
            == whole[recipe]["summary"]["validation_loss"]
        )
        assert len(log_lines(tmp_path / f"parts/{recipe}.jsonl")) == 1 + 6 + 1
    for recipe in ("rowwise", "mxfp8"):
        ours, theirs = (
            weights(saved / f"{recipe}.pt"),
            weights(tmp_path / f"whole/saved/{recipe}.pt"),
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_ctrl_c_in_the_closing_validation_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_gpt.validation_loss

    def interrupted(run: train_gpt.Run, job: train_gpt.Job) -> float:
        signal.raise_signal(signal.SIGINT)
        return plain(run, job)

    monkeypatch.setattr(train_gpt, "validation_loss", interrupted)
    with pytest.raises(SystemExit, match="130"):
        train(tmp_path, "--steps 2 --layers 1 --recipe bf16 rowwise")
    saved = tmp_path / "checkpoints/bf16.pt"
    assert torch.load(saved, weights_only=True)["record"]["summary"]["validation_loss"] > 0


def test_a_training_can_go_further_than_first_asked(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--steps 6 --recipe rowwise")["runs"]["rowwise"]
    train(tmp_path / "parts", f"--steps 3 --recipe rowwise --save {tmp_path}/saved")
    more = train(tmp_path / "parts", f"--steps 6 --recipe rowwise --resume {tmp_path}/saved")
    assert decided(more["runs"]["rowwise"]["rows"]) == decided(whole["rows"])


def test_an_interrupt_inside_an_update_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_update(self: torch.optim.AdamW) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", half_update)
    with pytest.raises(SystemExit, match="130"):
        train(tmp_path, "--steps 2 --recipe bf16")
    said = capsys.readouterr().out
    assert "stopped inside an update" in said and "--resume" not in said
    assert not (tmp_path / "checkpoints").exists()


def test_starting_anew_keeps_an_earlier_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path, f"--steps 2 --recipe bf16 --save {tmp_path}/saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["bf16.old", "bf16.pt"]


# ---- What is left behind ----


def test_png_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    runs = train(tmp_path, "--steps 3 --recipe bf16 rowwise")["runs"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    header, bf16, rowwise = capsys.readouterr().out.splitlines()[-3:]
    assert header.split("  ")[-1].strip() == "FP8 layers"
    gap = 100 * (runs["rowwise"]["summary"]["loss"] / runs["bf16"]["summary"]["loss"] - 1)
    assert f"{gap:+.2f}%" in rowwise and rowwise.endswith("14 of 15")
    assert "unknown" in bf16 and bf16.endswith("0 of 15")


def test_utilisation_is_against_both_peaks() -> None:
    summary = {
        "loss": 2.0,
        "validation_loss": 2.0,
        "tokens_per_s": 1e4,
        "mfu_bf16": train_gpt.utilisation(4e14, 1e15),
        "mfu_fp8": train_gpt.utilisation(4e14, 2e15),
        "peak_memory_bytes": 3 * 2**29,
        "fp8_layers": 1,
        "all_layers": 2,
    }
    _, line = report.table({"rowwise": {"summary": summary, "stopped": None}})
    assert line == [
        "rowwise",
        "2.0000",
        "-",
        "2.0000",
        "10,000",
        "40.0%",
        "20.0%",
        "1.50 GiB",
        "1 of 2",
    ]
    assert train_gpt.utilisation(4e14, None) is None and report.percent(None) == "unknown"


def test_losses_and_gaps_are_those_of_the_rows(tmp_path: Path) -> None:
    runs = train(tmp_path, "--steps 5 --layers 1 --recipe bf16 rowwise --last 3")["runs"]
    written = json.loads((tmp_path / "losses.json").read_text())
    assert written["mean_of_last"] == 3 and list(written["recipes"]) == ["bf16", "rowwise"]
    means = {}
    for recipe, losses in written["recipes"].items():
        means[recipe] = statistics.fmean(row["loss"] for row in runs[recipe]["rows"][2:])
        assert losses["loss"] == means[recipe] == runs[recipe]["summary"]["loss"]
        assert losses["steps"] == 5 and losses["stopped"] is None
    bf16, rowwise = written["recipes"].values()
    assert bf16["gap_percent"] == bf16["validation_gap_percent"] == 0.0
    assert rowwise["gap_percent"] == pytest.approx(100 * (means["rowwise"] / means["bf16"] - 1))
    held_out = rowwise["validation_loss"] / bf16["validation_loss"]
    assert rowwise["validation_gap_percent"] == pytest.approx(100 * (held_out - 1))


def test_losses_without_bf16_or_end_are_null(tmp_path: Path) -> None:
    summary = {"validation_loss": 2.0, "tokens_per_s": 5.0}
    record = {"rows": [{"loss": 2.0}, {"loss": math.nan}], "summary": summary, "stopped": "nan"}
    report.save_losses({"rowwise": record}, tmp_path / "losses.json")
    (losses,) = json.loads((tmp_path / "losses.json").read_text())["recipes"].values()
    assert losses["loss"] is losses["gap_percent"] is losses["validation_gap_percent"] is None
    assert losses["stopped"] == "nan" and losses["validation_loss"] == 2.0


def test_smoothing_ends_on_the_mean_of_the_last() -> None:
    steps, means = report.smooth([4.0, 2.0, 0.0, 7.0], window=2)
    assert (steps, means) == ([0.0, 0.5, 1.5, 2.5], [4.0, 3.0, 1.0, 3.5])


def test_missing_packages_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tqdm", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    train(tmp_path, "--steps 1 --recipe bf16 --tensorboard")
    said = capsys.readouterr().out
    assert "tqdm is not installed: progress is printed as lines (pip install tqdm)\n" in said
    assert "matplotlib is not installed: loss.png is not drawn (pip install matplotlib)\n" in said
    assert "tensorboard is not installed: no event files are written" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16.jsonl", "losses.json"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what tensorboard imports
def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, "--steps 2 --recipe bf16 --tensorboard")
    assert list((tmp_path / "tensorboard/bf16").glob("events.out.*"))


# ---- Refusals ----


def test_bad_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'fp8'" in refusal(capsys, tmp_path, "--recipe bf16 fp8")
    assert "argument --steps: 0 is not above 0" in refusal(capsys, tmp_path, "--steps 0")
    assert "argument --steps: invalid int value: 'x'" in refusal(capsys, tmp_path, "--steps x")
    assert "argument --lr: nan is not above 0" in refusal(capsys, tmp_path, "--lr nan")
    assert "--device gpu: it must be cpu, or cuda" in refusal(capsys, tmp_path, "--device gpu")
    said = refusal(capsys, tmp_path, "--dim 36 --heads 4")
    assert "a width of 36 does not divide into 4 heads of even width" in said
    said = refusal(capsys, tmp_path, "--heads 2 --kv-heads 3")
    assert "2 heads cannot share 3 heads of keys and values evenly" in said
    assert "--cuda-graph: a CPU has no such graphs" in refusal(capsys, tmp_path, "--cuda-graph")
    assert "'gfx1'; known are" in refusal(capsys, tmp_path, "--assume-device gfx1")


def test_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, tmp_path, f"--data {tmp_path}/none")
    assert said == f"train_gpt.py: error: --data {tmp_path}/none: there is no such file or folder\n"
    (tmp_path / "short").write_bytes(b"x" * 329)
    said = refusal(capsys, tmp_path, f"--data {tmp_path}/short")
    assert "short: 329 bytes of text are too few; with --seq-len 32 at least 330 are needed" in said
    (tmp_path / "short").write_bytes(b"x" * 330)
    assert train(tmp_path / "out", f"--data {tmp_path}/short --steps 1 --recipe bf16")["runs"]


def test_bad_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    said = refusal(capsys, tmp_path, f"--resume {saved}")
    assert f"--resume {saved}: there is no checkpoint (<recipe>.pt) in this folder" in said
    train(tmp_path, f"--steps 1 --recipe bf16 --save {saved}")
    said = refusal(capsys, tmp_path, f"--recipe bf16 rowwise --resume {saved}")
    assert "that was a training of bf16, without rowwise; leave this recipe out" in said
    said = refusal(capsys, tmp_path, f"--recipe bf16 --hidden 64 --seed 1 --resume {saved}")
    assert "that was another training (hidden was 48, is 64, seed was 0, is 1)" in said
    said = refusal(capsys, tmp_path, f"--recipe bf16 --schedule cosine --resume {saved}")
    assert "schedule was constant, is cosine" in said
