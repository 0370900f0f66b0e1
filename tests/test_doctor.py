"""python -m float8 doctor and support: what they say, and that the self-test can fail."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cast_oracle as oracle
import pytest
import torch
from expecttest import assert_expected_inline

from float8 import devices, doctor, formats
from float8.__main__ import main
from float8.devices import OPS, assume_device, describe, device_profile
from float8.formats import E4M3FN, E4M3FNUZ, E8M0, FORMATS
from float8.kernels import matmul
from float8.kernels import quantize as cast
from float8.kernels.matmul import Operand, select
from float8.recipe import RECIPES
from float8.scaling import FULL, SCALE_MODES, Block, scale_dtype
from float8.testing import needs

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ["cpu", pytest.param("cuda", marks=needs("cuda"))]
PASSED = {"ok": True, "seconds": 0.0, "checks": [{"name": "decode", "ok": True, "complaint": None}]}


@pytest.fixture
def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second a device, and most tests are of other things; nor do they need a GPU."""
    monkeypatch.setattr(doctor, "self_test", lambda device: PASSED)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


# Why an implementation refuses, by whether a whole row has one scale and by what the device has.
FAST = {
    (True, True): None,
    (False, True): "it multiplies whole rows.",
    (True, False): "nothing is fast here.",
    (False, False): "nothing is fast here.",
}


def complaints(found: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["complaint"] for c in found["checks"] if not c["ok"]}


# ------------------------------------------------------------------- arithmetic in plain Python


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f is not E8M0], ids=str)
def test_the_scalar_cast_is_another_oracles(fmt: formats.Float8Format) -> None:
    """Two authors read the rules; both are plain Python and share nothing."""
    x = doctor._sample(9, 70, torch.float32, hostile=True)
    x[7, ::2] = 3 * fmt.smallest_subnormal / 2  # ties, under the scale that the block will have
    blocks: list[Block] = [(1, 32), (FULL, FULL), (1, FULL), (4, 16)]
    for block in blocks:
        for mode in SCALE_MODES:
            data, scales = doctor.quantize_scalar(x.tolist(), block, fmt.name, mode)
            expected = oracle.quantize(x.flatten().tolist(), x.shape, block, fmt.name, mode)
            assert [byte for row in data for byte in row] == expected[0]
            bits = [oracle.bits_of(scale) for row in scales for scale in row]
            assert bits == [oracle.bits_of(scale) for scale in expected[1]]


def test_codes_decode_as_the_specifications_say() -> None:
    values = [
        f"{name}: " + ", ".join(f"{code:#04x} {doctor.decode(code, name):g}" for code in codes)
        for name, codes in (
            ("e4m3fn", (0x01, 0x08, 0x7E, 0x7F, 0x80, 0xFF)),
            ("e4m3fnuz", (0x01, 0x08, 0x7F, 0x80, 0xFF)),
            ("e5m2", (0x01, 0x04, 0x7B, 0x7C, 0x7D, 0xFC)),
            ("e5m2fnuz", (0x01, 0x04, 0x7F, 0x80, 0xFF)),
            ("e8m0", (0x00, 0x7F, 0xFE, 0xFF)),
        )
    ]
    assert_expected_inline(
        "\n".join(values),
        """\
e4m3fn: 0x01 0.00195312, 0x08 0.015625, 0x7e 448, 0x7f nan, 0x80 -0, 0xff nan
e4m3fnuz: 0x01 0.000976562, 0x08 0.0078125, 0x7f 240, 0x80 nan, 0xff -240
e5m2: 0x01 1.52588e-05, 0x04 6.10352e-05, 0x7b 57344, 0x7c inf, 0x7d nan, 0xfc -inf
e5m2fnuz: 0x01 7.62939e-06, 0x04 3.05176e-05, 0x7f 57344, 0x80 nan, 0xff -57344
e8m0: 0x00 5.87747e-39, 0x7f 1, 0xfe 1.70141e+38, 0xff nan""",
    )


# ---------------------------------------------------------------------------------- the self-test


@pytest.mark.parametrize("device", DEVICES)
def test_devices_pass(device: str) -> None:
    found = doctor.self_test(torch.device(device))
    assert complaints(found) == {}
    kinds = [check["name"].partition(" ")[0] for check in found["checks"]]
    assert kinds.count("decode") == 5 and kinds.count("product") >= 5
    assert kinds.count("cast") >= 10
    assert kinds.count("kernel") == (0 if device == "cpu" else kinds.count("cast"))


def test_a_cast_of_every_recipe_is_tested() -> None:
    for arch in ("cpu", "gfx942"):
        with assume_device(arch):
            tested = doctor._cast_plans(torch.device("cpu"))
            for recipe in RECIPES.values():
                for plan in recipe.plan(torch.device("cpu")):
                    assert plan is None or {plan.a, plan.b} <= set(tested)


def test_a_wrong_maximum_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes of FNUZ under the maximum of FN: what makes every large value a NaN."""
    wrong = dataclasses.replace(E4M3FNUZ, max=E4M3FN.max)
    monkeypatch.setitem(formats._BY_DTYPE, E4M3FNUZ.dtype, wrong)
    monkeypatch.setattr(doctor, "FORMATS", (wrong,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["doctor", "--assume", "gfx942"]) == 1
    text = capsys.readouterr().out
    cpu, _, gfx942 = text.partition("gfx942 (assumed)")
    assert "FAILED: 1 of " in cpu
    assert "decode e4m3fnuz: its maximum is taken to be 448, by its bit layout it is 240" in cpu
    assert "cast e4m3fnuz (1, FULL) fp32: the reference against plain" in gfx942
    assert max(map(len, text.splitlines())) < 100


def test_one_wrong_byte_or_scale_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true = cast.quantize
    (plan,) = {p.a for p in RECIPES["blockwise"].plan(torch.device("cpu")) if p is not None}

    def wrong_byte(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = true(*args)
        data.view(torch.uint8)[130, 135] ^= 1
        return data, scale

    def wrong_scale(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = true(*args)
        scale[130, 1] = torch.nextafter(scale[130, 1], torch.tensor(2.0))
        return data, scale

    assert doctor._check_reference(plan) is None
    messages = []
    for wrong in (wrong_byte, wrong_scale):
        monkeypatch.setattr(cast, "quantize", wrong)
        messages.append(str(doctor._check_reference(plan)).partition(": ")[2])
    assert_expected_inline(
        "\n".join(messages),
        """\
1 of 17816 differ, the first at (130, 135): 0xe7 instead of 0xe6
1 of 262 differ, the first at (130, 1): 0.001822335529141128 instead of 0.0018223354127258062""",
    )


def test_a_kernel_that_differs_from_the_reference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands in for the kernels of a GPU."""
    device = torch.device("cpu")
    (plan,) = {p.a for p in RECIPES["mxfp8"].plan(device) if p is not None}
    assert doctor._check_kernels(plan, device) is None
    true = doctor._parts

    def one_of_them(x: torch.Tensor, plan: cast.CastPlan) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = true(x, plan)
        if x.shape == (1000, 33):
            scale[7, 1] += 1
        return data, scale

    monkeypatch.setattr(doctor, "_parts", one_of_them)
    assert_expected_inline(
        str(doctor._check_kernels(plan, device)).replace(": ", ":\n"),
        """\
the kernel against the reference, torch.bfloat16 33x1000:
1 of 2000 differ, the first at (7, 1):
0x73 instead of 0x74""",
    )


def test_a_wrong_product_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true = doctor.multiply

    def one_row_doubled(a: Any, b: Any, impl: str, **options: Any) -> torch.Tensor:
        if a.block == (1, FULL):
            scale = a.scale.clone()
            scale[3] *= 2
            a = a.replace(scale=scale)
        return true(a, b, impl, **options)

    monkeypatch.setattr(doctor, "multiply", one_row_doubled)
    monkeypatch.setattr(doctor, "_check_reference", lambda plan: None)
    found = complaints(doctor.self_test(torch.device("cpu")))
    assert set(found) == {"product rowwise forward by torch", "product rowwise dgrad by torch"}
    assert all(text.startswith("relative error 0.") for text in found.values())


def test_a_check_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: cast.CastPlan) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor, "_check_reference", broken)
    found = doctor.self_test(torch.device("cpu"))
    assert not found["ok"]
    assert set(complaints(found).values()) == {"RuntimeError: no kernel image is available"}


def test_a_device_that_decodes_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "decode_scale", lambda scale: scale.view(torch.uint8).float())
    assert_expected_inline(
        str(doctor._check_codes(E8M0, torch.device("cpu"))),
        """256 of 256 differ, the first at (0,): 0.0 instead of 5.877471754111438e-39""",
    )


# ------------------------------------------------------------------------------------- what it says


def test_json_is_one_object(no_self_test: None, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    arguments = ["doctor", "--json", "--assume", "gfx942", "--assume", "sm_90", "--matmul"]
    assert main([*arguments, "512", "100", "768"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["ok"] and found["matmul_sizes"] == [512, 100, 768]
    assert found["versions"]["torch"] == torch.__version__
    assert [d["device"] for d in found["devices"]] == ["cpu", "gfx942", "sm_90"]
    assert [d["assumed"] for d in found["devices"]] == [False, True, True]
    assert found["devices"][1]["formats"] == {"e4m3fnuz": 240.0, "e5m2fnuz": 57344.0}
    for device in found["devices"]:
        assert sorted([*device["native"], *device["not_native"]]) == sorted(OPS)
        assert len(device["matmul"]) == 3 * len(RECIPES)
        assert all(m["impl"] not in m["refusals"] for m in device["matmul"])


def test_the_report_for_a_reader(no_self_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("float8", "python", "torch", "cuda", "rocm", "triton")
    monkeypatch.setattr(doctor, "versions", lambda: dict.fromkeys(names))
    fast = {"fast": lambda profile, a, b: FAST[(a.block[1] == FULL, bool(profile.native))]}
    table = {**fast, "torch": lambda profile, a, b: None}
    for module in (doctor, matmul):
        monkeypatch.setattr(module, "IMPLEMENTATIONS", table)
    text = doctor.render(doctor.report(["gfx942"], (512, 100, 768)))
    assert max(map(len, text.splitlines())) < 100
    assert_expected_inline(
        text,
        """\
versions      float8 not installed (a checkout), Python -, torch -, CUDA -, ROCm -, triton -

cpu
  formats       e4m3fn (maximum 448), e5m2 (maximum 57344). torch has no fast FP8 on a CPU. FP8 is
                emulated in the FN formats.
  native        nothing
  not native    convert, mm_tensorwise, mm_rowwise, mm_blockwise, mm_mx, grouped: torch has no
                fast FP8 on a CPU.
  casts         the PyTorch reference: torch has no fast FP8 on a CPU.
  alignment     1 bytes: Emulation takes every size.
  peak          bf16 unknown, FP8 unknown
  matmul        rows x columns x contraction: forward 512x100x768; dgrad 512x768x100; wgrad
                100x768x512
                recipe              forward         dgrad           wgrad
                tensorwise          torch           torch           torch
                rowwise             torch           torch           torch
                rowwise_wgrad_hp    torch           torch           high precision
                blockwise           torch           torch           torch
                mxfp8               torch           torch           torch
  chosen        the first that takes it of fast, torch
  refused       fast: nothing is fast here.
  self-test     passed: 1 tables of codes (0.0 s)

gfx942 (assumed)
  formats       e4m3fnuz (maximum 240), e5m2fnuz (maximum 57344). gfx942 has the FNUZ formats.
  native        convert, mm_tensorwise, mm_rowwise, grouped. This is what the architecture has;
                here it is assumed, and all is emulated.
  not native    mm_blockwise: torch multiplies 128-wide blocks on sm_90 only.
                mm_mx: gfx942 has FNUZ FP8, and MX is made of OCP formats.
  casts         the PyTorch reference: gfx942 is assumed; PyTorch's reference runs.
  alignment     16 bytes: K and N are multiples of 16; with MX blocks M is too, and K is a
                multiple of 128.
  peak          bf16 unknown, FP8 unknown
  matmul        rows x columns x contraction: forward 512x100x768; dgrad 512x768x100; wgrad
                100x768x512
                recipe              forward         dgrad           wgrad
                tensorwise          fast*           fast*           fast
                rowwise             fast*           fast*           fast
                rowwise_wgrad_hp    fast*           fast*           high precision
                blockwise           torch           torch           torch
                mxfp8               torch           torch           torch
                * padded inside: not all multiples of 16
  chosen        the first that takes it of fast, torch
  refused       fast: it multiplies whole rows. (blockwise, mxfp8)
  self-test     passed: 1 tables of codes (0.0 s)""",
    )


def test_every_architecture_can_be_assumed(no_self_test: None) -> None:
    found = doctor.report([*devices._TABLE, "cpu"], (1, 0, 4097))
    text = doctor.render(found)
    assert max(map(len, text.splitlines())) < 100
    assert len(found["devices"]) == 1 + len(devices._TABLE)  # each once
    for device in found["devices"][1:]:
        row = describe(device["arch"])
        assert (set(device["native"]), device["why"]) == (row.native, row.why)
        assert device["not_native"] == dict(row.refusals)


@pytest.mark.parametrize("device", DEVICES)
def test_the_choice_is_the_one_that_select_makes(device: str) -> None:
    where = torch.device(device)
    found = doctor.matmuls(where, device_profile(where), (64, 64, 64))
    plans = [plan for recipe in RECIPES.values() for plan in recipe.plan(where)]
    for entry, plan in zip(found, plans, strict=True):
        if plan is None:
            assert entry["impl"] == "high precision"
            continue
        assert entry["impl"] == plan.impl
        a, b = (Operand(p.dtype, p.block, scale_dtype(p.scale_mode)) for p in plan[:2])
        for name, reason in entry["refusals"].items():
            with pytest.raises(ValueError, match="cannot multiply") as error:
                select(where, a, b._replace(block=b.block[::-1]), name)
            assert reason.rstrip(".") in str(error.value)


def test_an_assumed_architecture_says_what_it_would_choose() -> None:
    cpu = torch.device("cpu")
    with assume_device("sm_90"):
        found = doctor.matmuls(cpu, describe("sm_90"), (512, 100, 768))
    chosen = {(entry["recipe"], entry["gemm"]): entry for entry in found}
    assert chosen["blockwise", "wgrad"]["impl"] != "torch"
    assert chosen["mxfp8", "dgrad"]["impl"] == "torch_bf16"
    assert not chosen["mxfp8", "dgrad"]["padded"]
    assert chosen["tensorwise", "forward"]["shape"] == (512, 100, 768)
    assert chosen["tensorwise", "dgrad"]["shape"] == (512, 768, 100)
    assert chosen["tensorwise", "wgrad"]["shape"] == (100, 768, 512)
    with assume_device("gfx942"):
        found = doctor.matmuls(cpu, describe("gfx942"), (512, 100, 768))
    mx = {entry["gemm"]: entry for entry in found if entry["recipe"] == "mxfp8"}
    assert mx["forward"]["impl"] == "triton"
    assert not mx["forward"]["padded"]  # but for the contraction any size will do
    assert mx["dgrad"]["padded"]
    padded = [chosen["tensorwise", gemm]["padded"] for gemm in ("forward", "dgrad", "wgrad")]
    assert padded == [True, True, False]  # N and the contraction; M is free


def test_each_visible_gpu_is_reported(no_self_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"peak_bf16": 989.4e12, "peak_fp8": 1978.9e12, "peak_source": "a datasheet"}
    h200 = dataclasses.replace(describe("sm_90"), product="NVIDIA H200", **peaks)
    rows = {"cpu": describe("cpu"), "cuda:0": h200, "cuda:1": describe("sm_89")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "device_profile", lambda device: rows[str(device)])
    monkeypatch.setattr(doctor, "_cast_plans", lambda device: [])
    monkeypatch.setattr(doctor, "format_for", lambda device, kind: E4M3FN)
    found = doctor.report([])
    assert [d["device"] for d in found["devices"]] == ["cpu", "cuda:0", "cuda:1"]
    text = doctor.render(found)
    assert "cuda:0: NVIDIA H200, sm_90" in text
    assert "bf16 989.4 TFLOP/s, FP8 1978.9 TFLOP/s (a datasheet)" in text


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor.versions()["triton"] is None
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9"))
    assert doctor.versions()["triton"] == "9.9"
    assert doctor.versions()["cuda"] == torch.version.cuda


# ----------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    "arguments",
    [
        "doctor --assume h100",
        "doctor --matmul 1 2",
        "doctor --matmul 1 2 -3",
        "doctor --matmul 1 2 x",
        "doctor --js",
        "heal",
    ],
)
def test_bad_arguments_are_refused_in_words(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_what_is_said_of_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ("doctor --assume h100", "doctor --matmul 1 2 3.5"):
        with pytest.raises(SystemExit):
            main(arguments.split())
    said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert_expected_inline(
        "\n".join(said),
        """\
python -m float8 doctor: error: argument --assume: Unknown architecture 'h100'; known are sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, gfx90a, gfx942, gfx950, gfx1200, gfx1201, cpu.
python -m float8 doctor: error: argument --matmul: '3.5' is not a size; M, N and K are whole numbers from 0""",  # noqa: E501
    )


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("doctor", "support", "baseline"))


def test_the_page_of_support_is_what_the_command_prints() -> None:
    """And importing the package loads none of its commands; one process tells both."""
    code = (
        "import float8, runpy, sys\n"
        "print(*{'float8.doctor', 'float8.baseline', 'argparse'} & sys.modules.keys() - before)\n"
        "sys.argv = ['float8', 'support']\n"
        "runpy.run_module('float8', run_name='__main__')"
    )
    code = "import sys, torch; before = set(sys.modules)\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    loaded, _, page = done.stdout.partition("\n")
    assert loaded == ""
    written = (ROOT / "docs" / "support.md").read_text()
    assert page == written, "run: python -m float8 support > docs/support.md"
    table = "\n".join(line for line in page.splitlines() if line.startswith("| "))
    assert table in (ROOT / "README.md").read_text(), "README.md shows the same table"


def test_support_tells_who_multiplies_on_every_architecture() -> None:
    text = doctor.support_table()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, rows = lines[0], {line[0]: line[1:] for line in lines[2:]}
    assert list(rows) == list(devices._TABLE)
    who = {arch: [cell.partition(" [")[0] for cell in cells[2:]] for arch, cells in rows.items()}
    assert head[3:] == ["tensorwise", "rowwise", "blockwise", "mxfp8", "experts"]
    assert who["sm_90"] == ["cublas", "cublas", "cublas", "torch_bf16", "hopper"]
    assert who["sm_100"] == ["cublas", "cublas", "triton", "cublas", "triton"]
    assert who["gfx942"] == who["gfx950"] == ["cublas", "cublas", "triton", "triton", "triton"]
    assert who["gfx1200"] == ["cublas", *["emulated"] * 4]
    assert who["sm_80"] == who["gfx90a"] == who["cpu"] == ["emulated"] * 5
    assert "e4m3fnuz, 240" in rows["gfx942"]
    notes = re.findall(r"^- \[(\d+)\] (.+)$", text, re.MULTILINE)
    assert [int(number) for number, _ in notes] == list(range(1, len(notes) + 1))
    noted = " ".join(cell for cells in rows.values() for cell in cells[2:])
    used = {n for listed in re.findall(r"\[(.+?)\]", noted) for n in listed.split(", ")}
    assert used == {number for number, _ in notes}
    for arch in rows:
        for op in ("mm_tensorwise", "mm_rowwise", "mm_blockwise", "mm_mx"):
            reason = describe(arch).refusal(op)
            assert reason is None or f"] {reason.rstrip('.')}\n" in text
