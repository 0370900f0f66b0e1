"""python -m float8 baseline: training still gives the recorded losses; what a check sees."""

import dataclasses
import hashlib
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from float8 import baseline, formats
from float8.__main__ import main
from float8.devices import assumed_device
from float8.formats import E4M3FN, E4M3FNUZ
from float8.recipe import RECIPES

RECORDED = [5.0 - step / 50 for step in range(100)]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Baselines of two steps, in a folder of their own."""
    monkeypatch.setattr(baseline, "FOLDER", tmp_path / "baselines")
    monkeypatch.setattr(baseline, "STEPS", 2)
    return tmp_path / "baselines"


def changed(losses: list[float], step: int, factor: float) -> list[float]:
    return [loss * factor if i == step else loss for i, loss in enumerate(losses)]


# ------------------------------------------------------------------------------ what is recorded


@pytest.mark.parametrize("name", ["rowwise-fn", "blockwise-fnuz", "moe-rowwise-fn"])
def test_training_gives_the_recorded_losses(name: str) -> None:
    """The first steps only; `python -m float8 baseline --check` is the whole of it."""
    verdict = baseline.check(name, baseline.versions(), 10)
    assert verdict.complaint is None, f"{verdict.complaint}\n{baseline.table(verdict)}"


def test_every_recipe_is_recorded_in_both_arithmetics() -> None:
    files = {path.stem: json.loads(path.read_text()) for path in baseline.FOLDER.glob("*.json")}
    assert set(files) == set(baseline.NAMES)
    dense = {"bf16", *(f"{r}-{f}" for r in RECIPES for f in ("fn", "fnuz"))}
    assert set(files) == dense | {f"moe-{name}" for name in dense}
    for moe in (False, True):
        made_by = [r["versions"] for name, r in files.items() if name.startswith("moe-") == moe]
        assert len(set(map(json.dumps, made_by))) == 1
    curves = set()
    for name, recorded in files.items():
        assert recorded["name"] == name
        how = name.removeprefix("moe-")
        assert recorded["settings"]["recipe"] == how.rpartition("-")[0] or how == "bf16"
        expected = baseline.FNUZ_DEVICE if name.endswith("fnuz") else None
        assert recorded["settings"]["assumed device"] == expected
        losses = recorded["losses"]
        assert len(losses) == baseline.STEPS and all(map(math.isfinite, losses))
        assert losses[0] == pytest.approx(math.log(256), rel=0.01)
        assert losses[-1] < 0.5 * losses[0]  # it learned something
        curves.add(tuple(losses))
    assert len(curves) == len(files)


def test_the_text_never_changes() -> None:
    text = baseline.text()
    assert len(text) == 60_000 and text.isascii()
    assert hashlib.sha256(text).hexdigest() == baseline.load("bf16")["settings"]["text"]
    assert baseline.text(1000) == text[:1000]
    random.seed(1)
    assert baseline.text() == text


# ----------------------------------------------------------------- a run that differs, in training


def test_a_wrong_maximum_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FNUZ bytes under the maximum of FN: NaN for every block's largest values."""
    wrong = dataclasses.replace(E4M3FNUZ, max=E4M3FN.max)
    monkeypatch.setitem(formats._BY_DTYPE, E4M3FNUZ.dtype, wrong)
    assert main(["baseline", "--check", "rowwise-fnuz", "--steps", "3"]) == 1
    said = capsys.readouterr().out
    assert "rowwise-fnuz: the training stopped after step 0 of 3." in said
    assert said.rstrip().endswith("python -m float8 baseline --update rowwise-fnuz")


def test_each_arithmetic_has_bits_of_its_own() -> None:
    """On one machine: the same run again agrees; another flavour, or another maximum, does not."""
    fn, again, fnuz = (
        baseline.train(name, 3)["losses"] for name in ("rowwise-fn",) * 2 + ("rowwise-fnuz",)
    )
    assert baseline.compare("rowwise-fn", fn, again, exact=True).complaint is None
    verdict = baseline.compare("rowwise-fn", fn, fnuz, exact=True)
    assert verdict.complaint == "3 of 3 losses differ in their bits, the first at step 0"
    # What only a check bit for bit can see: the band is for arithmetic that is broken.
    assert baseline.compare("rowwise-fn", fn, fnuz, exact=False).complaint is None


def test_a_smaller_maximum_is_seen_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """240 in FN: nothing overflows, the codes above it go unused."""
    right = baseline.train("blockwise-fn", 2)["losses"]
    wrong = dataclasses.replace(E4M3FN, max=E4M3FNUZ.max)
    monkeypatch.setitem(formats._BY_DTYPE, E4M3FN.dtype, wrong)
    verdict = baseline.compare(
        "blockwise-fn", right, baseline.train("blockwise-fn", 2)["losses"], True
    )
    assert verdict.complaint is not None


def test_products_of_twice_the_size_are_seen_on_any_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = sys.modules["float8.linear"].multiply_parts
    for name in ("float8.linear", "float8.mlp"):  # float8.linear, the attribute, is the function
        monkeypatch.setattr(sys.modules[name], "multiply_parts", lambda *args: 2 * true(*args))
    elsewhere = baseline.versions() | {"torch": "0"}
    verdict = baseline.check("rowwise-fn", elsewhere, 5)
    assert not verdict.exact
    assert (verdict.complaint or "").startswith("one of the first 5 losses differs by 0.2")


def test_training_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        path, matplotlib = list(sys.path), sys.modules.get("matplotlib")
        baseline.train("mxfp8-fnuz", 1)
        assert torch.get_num_threads() == 2
        assert (path, matplotlib) == (sys.path, sys.modules.get("matplotlib"))
        assert assumed_device() is None
        assert capsys.readouterr().out == ""
        state = torch.get_rng_state()
        assert baseline.arithmetic() == baseline.arithmetic()
        assert torch.equal(state, torch.get_rng_state())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------- the judgement


@pytest.mark.parametrize("exact", [True, False])
def test_what_a_check_lets_pass(exact: bool) -> None:
    def complaint(now: list[float]) -> str:
        return f"{baseline.compare('x', RECORDED, now, exact).complaint}"

    said = [
        complaint(RECORDED),
        complaint(changed(RECORDED, 50, 1 + 2**-20)),
        complaint(changed(RECORDED, 0, 1.00099)),
        complaint(changed(RECORDED, 4, 1.00101)),
        complaint(changed(RECORDED, 5, 1.15)),
        complaint(changed(RECORDED, 5, 1.2)),
        complaint(changed(RECORDED, 99, 1.3)),
        complaint([*RECORDED[:7], math.nan]),
        complaint([*RECORDED[:99], math.inf]),
        complaint([math.nan]),
    ]
    text = "\n".join(said)
    if exact:
        assert_expected_inline(
            text,
            """\
None
1 of 100 losses differ in their bits, the first at step 50
1 of 100 losses differ in their bits, the first at step 0
one of the first 5 losses differs by 0.101%; 0.1% is allowed
1 of 100 losses differ in their bits, the first at step 5
the mean of 100 losses differs by 0.244%; 0.2% is allowed
the mean of 100 losses differs by 0.226%; 0.2% is allowed
the training stopped after step 7 of 100
the training stopped after step 99 of 100
the training stopped after step 0 of 100""",
        )
    else:
        assert_expected_inline(
            text,
            """\
None
None
None
one of the first 5 losses differs by 0.101%; 0.1% is allowed
None
the mean of 100 losses differs by 0.244%; 0.2% is allowed
the mean of 100 losses differs by 0.226%; 0.2% is allowed
the training stopped after step 7 of 100
the training stopped after step 99 of 100
the training stopped after step 0 of 100""",
        )


def test_the_table_shows_the_first_steps_that_differ() -> None:
    now = [loss * (1 + 1e-3 * (step >= 40)) for step, loss in enumerate(RECORDED)]
    verdict = baseline.compare("x", RECORDED, now, exact=True)
    assert_expected_inline(
        baseline.table(verdict, 3),
        """\
    step              recorded                   now  difference
      40     4.200000000000000     4.204200000000000    1.00e-03
      41     4.180000000000000     4.184180000000000    1.00e-03
      42     4.160000000000000     4.164160000000000    1.00e-03
          and 57 more""",
    )


def test_bit_for_bit_is_asked_only_where_torch_computes_the_same() -> None:
    recorded = {"versions": dict.fromkeys((*baseline.EXACT, "python", "platform"), "a")}
    here = dict.fromkeys(recorded["versions"], "a")
    assert baseline.why_not_exact(recorded, here | {"python": "b", "platform": "b"}) is None
    reasons = [str(baseline.why_not_exact(recorded, here | {key: "b"})) for key in baseline.EXACT]
    assert_expected_inline(
        "\n".join(reasons),
        """\
torch was a, is b
cpu_capability was a, is b
plain torch, without any FP8, computes other bits here (another CPU, or another build of torch)
threads was a, is b""",
    )


def test_versions_are_those_of_a_check() -> None:
    here = baseline.versions()
    assert set(here) == set(baseline.load("bf16")["versions"])
    assert here["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert here["torch"] == torch.__version__.partition("+")[0]


# ------------------------------------------------------------------------------------ the command


def test_update_records_what_check_compares(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["baseline", "--update", "bf16"]) == 0
    assert capsys.readouterr().out.split() == ["bf16", "new"]
    assert main(["baseline", "--update", "bf16"]) == 0
    assert capsys.readouterr().out.split() == ["bf16", "unchanged"]
    assert main(["baseline", "--check", "bf16"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("baseline ") and line.startswith("bf16 ")
    assert "bit for bit" in line and line.endswith("ok")

    path = folder / "bf16.json"
    recorded = json.loads(path.read_text())
    recorded["losses"][1] *= 1 + 2**-20
    path.write_text(json.dumps(recorded))
    assert main(["baseline", "--check", "bf16"]) == 1
    said = capsys.readouterr().out
    assert "bf16: 1 of 2 losses differ in their bits, the first at step 1." in said
    assert "1 of 1 differ." in said and max(map(len, said.splitlines())) < 140

    recorded["versions"]["torch"] = "2.0.0"
    path.write_text(json.dumps(recorded))
    assert main(["baseline", "--check", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "Compared in the band, not bit for bit: torch was 2.0.0, is " in said
    assert "in the band" in said and "bit for bit" in said
    assert main(["baseline", "--update", "bf16"]) == 0
    assert capsys.readouterr().out.split(maxsplit=1)[1] == "changed, the mean by 0.000%\n"


def refusal(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    try:
        status: Any = main(["baseline", *arguments.split()])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_asked_is_refused_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [
        refusal(capsys, "--check rowwise"),
        refusal(capsys, "--check --steps 0"),
        refusal(capsys, "--update bf16 --steps 2"),
        refusal(capsys, "--check bf16 --update bf16"),
        refusal(capsys, ""),
        refusal(capsys, "--check bf16").replace(str(folder), "FOLDER"),
    ]
    main(["baseline", "--update", "bf16"])
    path = folder / "bf16.json"
    recorded = json.loads(path.read_text())
    recorded["settings"]["lr"] = 1.0
    path.write_text(json.dumps(recorded))
    said.append(refusal(capsys, "--check bf16"))
    monkeypatch.setattr(baseline, "ROOT", Path("/nowhere"))
    monkeypatch.setattr(baseline, "EXAMPLES", Path("/nowhere/examples"))
    said.append(refusal(capsys, "--check"))
    assert_expected_inline(
        "\n".join(said),
        """\
python -m float8 baseline: error: argument --check: there is no baseline 'rowwise'; those are bf16, tensorwise-fn, tensorwise-fnuz, rowwise-fn, rowwise-fnuz, rowwise_wgrad_hp-fn, rowwise_wgrad_hp-fnuz, blockwise-fn, blockwise-fnuz, mxfp8-fn, mxfp8-fnuz, moe-bf16, moe-tensorwise-fn, moe-tensorwise-fnuz, moe-rowwise-fn, moe-rowwise-fnuz, moe-rowwise_wgrad_hp-fn, moe-rowwise_wgrad_hp-fnuz, moe-blockwise-fn, moe-blockwise-fnuz, moe-mxfp8-fn, moe-mxfp8-fnuz
python -m float8 baseline: error: argument --steps: 0 is not a number of steps from 1 to 2
--steps is for --check: a baseline always holds all its steps.
python -m float8 baseline: error: argument --update: not allowed with argument --check
python -m float8 baseline: error: one of the arguments --check --update is required
FOLDER/bf16.json: there is no such baseline; python -m float8 baseline --update bf16 makes it
bf16 was recorded with other settings (lr was 1.0, is 0.003); to record it with these: python -m float8 baseline --update bf16
The baselines are trained by examples/train_gpt.py, which is not beside this package (/nowhere): a wheel has no examples. Clone the repository and run this there.""",  # noqa: E501
    )


def test_a_training_that_diverges_is_not_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = dataclasses.replace(E4M3FNUZ, max=E4M3FN.max)
    monkeypatch.setitem(formats._BY_DTYPE, E4M3FNUZ.dtype, wrong)
    assert_expected_inline(
        refusal(capsys, "--update rowwise-fnuz"),
        """rowwise-fnuz: the training stopped (step 0 has a loss of nan and a gradient norm of nan), which makes no baseline; the file stays as it was""",  # noqa: E501
    )
    assert not (folder / "rowwise-fnuz.json").exists()
