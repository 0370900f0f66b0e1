"""The benchmarks: every row's check on tiny shapes, and that nothing is timed without it."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import float8
from float8.kernels import matmul
from float8.kernels.quantize import quantize
from float8.testing import needs

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is no part of the package

from benchmarks import casts, gemm, registry, report, runner, step
from benchmarks.__main__ import BENCHES, main
from benchmarks.registry import Bench, Call, Contender, Options, shapes_of

CPU = torch.device("cpu")
PLAN = ((1, float8.FULL), float8.E4M3FN.dtype, "fp32")
# Dynamo looks at .grad of a block's input and hides the warning, which "error" makes a failure.
COMPILED_BLOCKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class FakeTimer(runner.Timer):
    """A timer without a GPU: what is timed is called, and takes as many us as its name is long."""

    def __init__(self) -> None:
        self.device, self.repeat = CPU, 1
        self.timed: list[str] = []

    def capture(self, calls: dict[str, Call]) -> tuple[dict[str, runner.Run], dict[str, str]]:
        kept: dict[str, runner.Run] = {n: call for n, call in calls.items() if n != "no graph"}
        return kept, {n: "no CUDA graph: it syncs" for n in calls if n not in kept}

    def microseconds(self, runs: dict[str, runner.Run], wait: bool = False) -> dict[str, float]:
        for run in runs.values():
            run()
        self.timed += runs
        return {name: float(len(name)) for name in runs}

    def seconds(self, call: Call) -> float:
        call()
        return 2.0

    def allocated(self, call: Call | None = None) -> int:
        return 0 if call is None else 3 << 30


def a_bench(change: Callable[[tuple[torch.Tensor, ...]], Any], **more: Contender) -> Bench:
    """A rowwise cast whose results are changed, and contenders beside it."""

    def make(shape: registry.Shape, options: Options) -> dict[str, Contender]:
        x = casts.random_input(shape, options.device)
        return (
            casts.contenders(
                lambda: change(torch.ops.float8.quantize(x, *PLAN)),
                lambda: quantize(x, *PLAN),
                lambda: casts.eager_cast(x, PLAN[0], float8.E4M3FN, "fp32"),
                {},
            )
            | more
        )

    shapes = {"default": {"small": (8, 64)}}
    return Bench("casts/test", make, shapes, (8, 64), "eager", lambda shape: 4000)


def measured(bench: Bench, eager: bool = False) -> tuple[FakeTimer, list[runner.Record]]:
    timer = FakeTimer()
    return timer, runner.measure(bench, "small", (8, 64), Options(CPU), timer, eager)


def a_run(rows: list[runner.Record]) -> runner.Record:
    where = {"card": "a card", "torch": "2", "triton": None, "torchao": "0.18", "commit": "abc"}
    where |= {"date": "2026-01-02", "copy_bytes_per_us": 4e6, "empty_us": 3.7, "repeat": 20}
    return {"environment": where, "rows": rows}


# --------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_smoke_of_every_row(bench: Bench) -> None:
    """Ours has the reference's bytes, and the baseline does the same job."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (row,) = runner.smoke(bench, Options(device))
    wrong = {n: c for n, c in row["contenders"].items() if "refused" in c or "absent" in c}
    assert not wrong
    assert bench.baseline in row["contenders"] and len(row["contenders"]) > 1


def test_list_names_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [bench.name for bench in BENCHES]
    assert "llama4-scout" in printed


def test_every_row_has_default_shapes_of_its_rank() -> None:
    for bench in BENCHES:
        assert bench.shapes["default"], bench.name
        every = [shape for shapes in bench.shapes.values() for shape in shapes.values()]
        assert {len(shape) for shape in every} == {len(bench.smoke)}, bench.name


def test_shapes_are_named_or_written_out() -> None:
    bench = next(b for b in BENCHES if b.name == "casts/rowwise-dual")
    assert shapes_of(bench, ["llama3-8b"])["llama3-8b x 14336"] == (8192, 14336)
    assert shapes_of(bench, ["48x64", "2x48x64"]) == {"48x64": (48, 64)}
    assert shapes_of(bench, ["default", "llama3-8b"]) == shapes_of(bench, ["default"]) | shapes_of(
        bench, ["llama3-8b"]
    )


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("casts/rowwise-row", (8192, 4096), 3 * 8192 * 4096 + 4 * 8192),
        ("casts/rowwise-dual", (8192, 4096), 6 * 8192 * 4096 + 4 * (8192 + 4096)),
        ("casts/tensorwise-dual", (8192, 4096), 6 * 8192 * 4096 + 4 * 2),
        ("casts/1x128-dual", (8192, 4096), 4 * 8192 * 4096 + 2 * 4 * 8192 * 4096 // 128),
        ("casts/128x128-dual", (8192, 4096), 4 * 8192 * 4096 + 2 * 4 * 64 * 32),
        ("casts/mxfp8-dual", (8192, 4096), 4 * 8192 * 4096 + 2 * 8192 * 4096 // 32),
        ("casts/rowwise-dual-experts", (3, 64, 32), 3 * (6 * 64 * 32 + 4 * (64 + 32))),
    ],
)
def test_bytes_that_a_cast_must_move(name: str, shape: registry.Shape, expected: int) -> None:
    bench = next(b for b in BENCHES if b.name == name)
    assert bench.bytes is not None and bench.bytes(shape) == expected


# -------------------------------------------------------------------------------------- the checks


def test_wrong_bytes_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    def flip(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs[0].view(torch.uint8)[3, 5] ^= 1
        return outputs

    timer, (row,) = measured(a_bench(flip))
    assert timer.timed == []
    assert runner.refusals(row) == {"float8": "1 of 512 elements of output 0 have other bits"}
    assert main(["run", "casts", "--smoke"], [a_bench(flip)]) == 1
    assert "1 of 512 elements of output 0 have other bits" in capsys.readouterr().out


def test_unwritten_memory_is_not_timed() -> None:
    """Also where it happens to hold the right bytes from a call before."""
    _, (row,) = measured(a_bench(lambda outputs: (torch.empty_like(outputs[0]), outputs[1])))
    assert "512 of 512 elements of output 0" in runner.refusals(row)["float8"]


def test_other_shapes_are_not_timed() -> None:
    _, (row,) = measured(a_bench(lambda outputs: (outputs[0], outputs[1].squeeze(1))))
    assert runner.refusals(row) == {
        "float8": "output 1 is torch.float32 (8,), the reference's torch.float32 (8, 1)"
    }
    _, (row,) = measured(a_bench(lambda outputs: outputs[:1]))
    assert runner.refusals(row) == {"float8": "1 outputs, the reference has 2"}


def test_another_job_is_no_contender() -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def expected() -> registry.Outputs:
        return quantize(x, *PLAN)

    data, scale = expected()
    assert casts.same_job(expected, lambda: (data, scale)) is None
    few = data.clone()
    few.view(torch.uint8)[0, :40] ^= 1  # 40 of 4096
    assert casts.same_job(expected, lambda: (few, scale)) is None
    few.view(torch.uint8)[0, 40:42] ^= 1
    assert casts.same_job(expected, lambda: (few, scale)) is not None
    transposed = data.view(torch.uint8).t().contiguous().t().view(data.dtype)
    assert casts.same_job(expected, lambda: (transposed, scale)) == (
        "output 0 has shape (64, 64), strides (1, 64)"
    )


def test_fused_casts_are_near_their_reference() -> None:
    """Up to 1% of bytes, and scales to within 1%; but all of it is written."""
    from benchmarks.fused import near_bytes

    data, scale = quantize(torch.randn(64, 64, dtype=torch.bfloat16), *PLAN)

    def verdict(data: torch.Tensor, scale: torch.Tensor) -> str | None:
        return near_bytes(lambda: (expected_data, expected_scale), lambda: (data, scale))

    expected_data, expected_scale = data.clone(), scale.clone()
    data.view(torch.uint8)[0, :40] ^= 1  # 40 of 4096
    assert verdict(data, scale * 1.009) is None
    scale[3] = float("nan")
    assert verdict(data, scale) == "1.56% of output 1 is not near the reference's"
    data.view(torch.uint8)[0, 40] ^= 1
    assert verdict(data, expected_scale) == "1.00% of output 0 is not near the reference's"


def test_a_wrong_recipe_leaves_the_others() -> None:
    more = Contender(lambda: lambda: (), lambda call: "0.0 dB", ours=True, line=True)
    timer, (row,) = measured(a_bench(lambda outputs: outputs, other=more))
    assert timer.timed == ["float8", "eager"] and runner.refusals(row) == {"other": "0.0 dB"}


def test_a_peer_that_fails_says_why() -> None:
    def fails() -> Call:
        raise NotImplementedError("not on\nthis device")

    peer = Contender(fails, lambda call: None)
    _, (row,) = measured(a_bench(lambda outputs: outputs, torchao=peer))
    assert row["contenders"]["torchao"]["absent"] == "NotImplementedError: not on this device"
    assert not runner.refusals(row)
    assert "torchao absent. NotImplementedError: not on this device" in report.plain(a_run([row]))


def test_layers_are_compared_with_bf16() -> None:
    from benchmarks.layers import near

    y = torch.randn(64, 64)
    assert near((y, y), lambda: (y, y + 0.1 * torch.randn(64, 64))) is None
    assert near((y, y), lambda: (y, y + torch.randn(64, 64))) is not None
    assert near((y,), lambda: (y + 0.1 * torch.randn(64, 64),), floor=25.0) is not None
    assert near((y, y), lambda: (y, y * float("nan"))) is not None
    assert near((y, y), lambda: (y,)) == "1 outputs, bf16 has 2"


@COMPILED_BLOCKS
def test_a_step_converts_what_a_peer_does_and_compiles_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torchao")
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    base, tokens, targets = step.build((3, 2, 16, 32, 4, 2, 64), CPU)
    converted = []

    def noted(convert: Callable[[step.GPT], object], model: step.GPT) -> None:
        convert(model)
        layers = model.named_modules()
        converted.append({name for name, layer in layers if "Float8Linear" in str(type(layer))})

    for convert in (
        partial(step.convert_to, "rowwise", False),
        partial(step.convert_peer, "tensorwise"),
    ):
        call = step.make_step(base, tokens, targets, partial(noted, convert))
        counter.frame_count = 0
        losses = [call()[0] for _ in range(2)]
        assert counter.frame_count == 1  # for three blocks, twice
        assert abs(losses[1] - losses[0]) < 1e-3
    assert len(converted[0]) == 3 * 7 and converted[0] == converted[1]


def test_a_step_trains() -> None:
    """With a learning rate to speak of, the loss falls."""
    model, tokens, targets = step.build((1, 1, 16, 32, 4, 2, 64), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "LEARNING_RATE", 0.01)
        call = step.training_step(model, tokens, targets)
    losses = [float(call()[0]) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.5 and losses == sorted(losses, reverse=True)
    assert len(call()) == 1 + len(list(model.parameters()))


def test_products_are_as_exact_as_the_reference() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    truth = torch.randn(256, 256, dtype=torch.float64)
    out = truth.bfloat16()
    error = gemm.worst_error(out, truth)

    def verdict(*outs: torch.Tensor) -> str | None:
        turns = iter(outs)
        return gemm.as_exact(truth, 2 * error, lambda: (next(turns),))

    assert 1e-3 < error < 2e-3
    assert verdict(out, out, out, out) is None
    late = out.clone()
    late[3, 5] += 1
    assert verdict(out, out, out, late) == "1 of 65536 elements are other bits in another call"
    assert str(verdict(late)).startswith("the error of a row or column is ")
    assert verdict(out[:, :8]) == "the product has shape (256, 8), the reference's (256, 256)"
    assert gemm.as_exact(truth, 2 * error, lambda: (torch.empty_like(out),)) == (
        "65536 of 65536 elements are unwritten, NaN or infinite"
    )
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_worst_row_or_column_counts() -> None:
    truth = torch.ones(4, 100, dtype=torch.float64)
    for at, error in (((0, 7), 0.5), ((slice(None), 7), 1.0), ((0,), 1.0)):
        out = truth.clone()
        out[at] = 2.0
        assert gemm.worst_error(out, truth) == pytest.approx(error)
    assert gemm.worst_error(truth, truth) == 0.0


def test_every_implementation_that_takes_the_operands_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(row: str) -> list[str]:
        bench = next(b for b in BENCHES if b.name == row)
        return list(bench.make((64, 64, 128), Options(CPU)))

    assert names("gemm/rowwise") == ["bf16"]  # the reference is of the smoke shape alone
    monkeypatch.setattr(float8, "device_profile", lambda device: float8.devices.describe("sm_90"))
    refuse = {**matmul.IMPLEMENTATIONS, "triton": matmul.triton_refusal}
    refuse["hopper"] = lambda *operands: "not here"
    monkeypatch.setattr(gemm, "IMPLEMENTATIONS", refuse)
    assert names("gemm/rowwise") == names("gemm/tensorwise-fast") == ["bf16", "cublas", "triton"]
    assert names("gemm/mxfp8") == ["bf16", "triton", "torch_bf16"]


# --------------------------------------------------------------------------- processes of their own


def in_a_process(shape: registry.Shape, options: Options) -> dict[str, Contender]:
    def hangs() -> Call:
        time.sleep(600)
        return lambda: ()

    makes: dict[str, Callable[[], Call]] = {
        "right": lambda: lambda: (),
        "raises": lambda: [][0],
        "dies": lambda: os._exit(3),
        "hangs": hangs,
    }
    return {n: Contender(make, lambda call: None, ours=True) for n, make in makes.items()}


def test_a_kernel_that_hangs_is_found() -> None:
    """And one that dies; what passes in a process of its own then runs in this one."""
    bench = Bench("casts/test", in_a_process, {}, (8, 64), "none")
    verdicts = {
        name: runner.isolated(bench, (8, 64), Options(CPU, isolate=limit), name)
        for name, limit in (("right", 120), ("raises", 120), ("dies", 120), ("hangs", 0.5))
    }
    assert verdicts == {
        "right": None,
        "raises": "IndexError: list index out of range",
        "dies": "its process died, exit code 3",
        "hangs": "hung: no verdict within 0.5 s",
    }


@pytest.mark.parametrize("wrong", [None, "hung"])
def test_what_fails_alone_does_not_run_here(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(runner, "isolated", lambda *args: (asked.append(args[-1]), wrong)[1])
    timer = FakeTimer()
    options = Options(CPU, isolate=5.0)
    (row,) = runner.measure(a_bench(lambda o: o), "small", (8, 64), options, timer, False)
    assert asked == ["float8"]  # the baseline is not ours
    assert runner.refusals(row) == ({} if wrong is None else {"float8": "hung"})
    assert ("float8" in timer.timed) == (wrong is None)


def test_every_row_can_go_to_another_process() -> None:
    for bench in BENCHES:
        assert pickle.loads(pickle.dumps(bench)).name == bench.name


# ----------------------------------------------------------------------------- times and reports


def test_contenders_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(done) * 1000

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = object.__new__(runner.Timer)
    timer.repeat = 5
    monkeypatch.setattr(timer, "flush", lambda: done.append("flush"))
    turns = iter([1, 5, 2, 1, 3])  # how much the second does in its turns: its median is 2
    times = timer.microseconds(
        {"a": lambda: done.append("a"), "b": lambda: done.extend("b" * next(turns))}
    )
    assert done.count("flush") == 10
    order = [done[i + 1] for i, step in enumerate(done) if step == "flush"]
    rounds = {"".join(order[i : i + 2]) for i in range(0, 10, 2)}
    assert rounds == {"ab", "ba"}  # each once a round, not always in the same order
    assert times == {"a": 1e6, "b": 2e6}


def test_ratios_and_shares() -> None:
    peer = Contender(lambda: lambda: (), lambda call: None)
    _, rows = measured(a_bench(lambda o: o, **{"torchao": peer, "no graph": peer}), eager=True)
    # float8 6 us, eager 5 us, torchao 7 us; 4000 bytes are moved
    cells = [["casts/test", "small 8x64", "graph", "float8", "6.0 us", "0.0 MB"]]
    assert report.lines(rows[0], 1000.0) == [[*cells[0], "67%", "0.83", "1.17", *[""] * 5]]
    assert [row["timing"] for row in rows] == ["graph", "eager"]
    assert rows[0]["contenders"]["no graph"]["absent"] == "no CUDA graph: it syncs"
    assert rows[1]["contenders"]["no graph"]["us"] == 8.0


def test_a_product_shows_flops() -> None:
    contender = Contender(lambda: lambda: (), lambda call: None, ours=True, line=True)
    contenders = {"bf16": contender, "cublas": contender, "tri": contender}
    shapes = {"default": {"small": (8, 64)}}
    bench = Bench("gemm/test", lambda shape, options: contenders, shapes, (8, 64), "bf16")
    bench = replace(bench, flops=lambda shape: 6 * 10**9)
    _, rows = measured(bench)
    run = a_run(rows)
    run["environment"]["peak_fp8"] = 2e15
    assert report.plain(run).splitlines()[2:] == [
        "row        shape       timing  contender  time    x bf16  TFLOPS  share of FP8 peak  "
        "x cublas",
        "gemm/test  small 8x64  graph   bf16       4.0 us  1.00    1500    75%                1.50",
        "gemm/test  small 8x64  graph   cublas     6.0 us  0.67    1000    50%                1.00",
        "gemm/test  small 8x64  graph   tri        3.0 us  1.33    2000    100%               2.00",
    ]
    del run["environment"]["peak_fp8"]  # an unknown card
    assert "peak" not in report.plain(run)


def test_json_comes_back_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = measured(a_bench(lambda outputs: outputs))
    file = tmp_path / "runs" / "run.json"
    report.save(a_run(rows), file)
    assert json.loads(file.read_text()) == a_run(rows)
    assert main(["table", str(file)]) == 0
    assert capsys.readouterr().out == (
        "a card, torch 2, torchao 0.18, commit abc, 2026-01-02, copy 4.00 TB/s, "
        "empty launch 3.7 us, median of 20.\n"
        "\n"
        "| row | shape | timing | contender | time | moved | share of copy | x eager |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| casts/test | small 8x64 | graph | float8 | 6.0 us | 0.0 MB | 0% | 0.83 |\n"
    )


def test_a_layer_shows_memory_and_compilation() -> None:
    contender = Contender(lambda: lambda: (), lambda call: None, ours=True, line=True, note="fast")
    contenders = {"bf16": contender, "rowwise": contender}
    bench = Bench("ffn/test", lambda shape, options: contenders, {}, (8, 64), "bf16")
    _, rows = measured(bench)
    assert report.plain(a_run(rows)).splitlines()[2:] == [
        "row       shape       timing  contender  time    x bf16  peak      first call",
        "ffn/test  small 8x64  graph   bf16       4.0 us  1.00    3.00 GiB  2.0 s",
        "ffn/test  small 8x64  graph   rowwise    7.0 us  0.57    3.00 GiB  2.0 s",
        "",
        "ffn/test: bf16: fast",
        "ffn/test: rowwise: fast",
    ]


def test_rich_shows_all_that_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    run = a_run(measured(a_bench(lambda outputs: outputs))[1])
    report.show(run)
    printed = capsys.readouterr().out
    assert report.plain(run) != printed and report.sentence(run) in printed
    assert all(
        cell in printed for _, table in report.tables(run) for cells in table for cell in cells
    )


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, rows = measured(a_bench(lambda outputs: outputs))
    report.plot(a_run(rows), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_says_where_it_was_made() -> None:
    where = runner.environment(CPU)
    assert where["torch"] == torch.__version__ and where["card"] == "CPU"
    assert where["commit"] == "unknown" or len(where["commit"].removesuffix("+dirty")) >= 7


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["run", "casts"], "torch sees none here; with --smoke it checks the results"),
        (["run", "nonesuch"], "no row is called 'nonesuch'"),
        (["run", "ffn", "--recipes", "rowwise,delayed"], "no recipe is called delayed"),
        (["run", "casts", "--repeat", "0"], "--repeat 0: a contender has one turn at least"),
        (["run", "casts", "--plot", "x.foo"], "its name must end in .png, .pdf, .svg"),
        (["run", "casts", "--smoke", "--shapes", "3x4"], "--smoke has shapes of its own"),
        (["table", "nonesuch.json"], "nonesuch.json is no saved run"),
    ],
)
def test_refusals(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_unknown_shapes_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        main(["run", "casts", "--shapes", "default,llama9"])
    assert "no row that was named has shapes for 'llama9'" in capsys.readouterr().err


@needs("cuda")
@COMPILED_BLOCKS
@pytest.mark.parametrize(
    "name, shape",
    [
        ("casts/1x128-dual", "256x384"),
        ("grouped/rowwise-col", "1024x256x4"),
        ("gemm/rowwise", "128x256x512"),
        ("linear/uncompiled", "64x128x256"),
        ("step/compiled", "2x2x128x256x4x2x512"),
    ],
)
def test_run_on_a_gpu(name: str, shape: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    options = ["--shapes", shape, "--recipes", "rowwise", "--repeat", "3", "--eager"]
    assert main(["run", name, *options, "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["environment"]["copy_bytes_per_us"] > 0
    assert [row["timing"] for row in run["rows"]] == ["graph", "eager"]
    for row in run["rows"]:
        assert all(0 < c["us"] < 1e6 for c in row["contenders"].values()), row
