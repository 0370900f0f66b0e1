"""Recipes: what they print, refuse and compare to, and what they become on a device."""

import copy
import dataclasses
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import float8
from float8 import (
    BLOCKWISE,
    FULL,
    MXFP8,
    RECIPES,
    ROWWISE,
    ROWWISE_WGRAD_HP,
    TENSORWISE,
    Cast,
    Gemm,
    Recipe,
    devices,
)
from float8.devices import describe
from float8.kernels import matmul
from float8.kernels.quantize import CastPlan
from float8.recipe import Plan

CPU = torch.device("cpu")


def wrapped(*messages: str) -> str:
    """Messages as this file pins them: no line is too long to read."""
    return "\n".join(
        textwrap.fill(m, 92, subsequent_indent="    ", break_on_hyphens=False) for m in messages
    )


def test_recipes_print_as_tables() -> None:
    expecttest = pytest.importorskip("expecttest")
    custom = dataclasses.replace(ROWWISE, name="mine", forward=None, weight_for_dgrad="save")
    text = "\n\n".join(map(str, (*RECIPES.values(), custom)))
    assert not any(line.endswith(" ") for line in text.splitlines())
    expecttest.assert_expected_inline(
        text,
        """\
Recipe tensorwise (weight for dgrad: recompute)
GEMM     first operand           second operand          accumulation
forward  e4m3 (FULL, FULL) fp32  e4m3 (FULL, FULL) fp32  fast
dgrad    e5m2 (FULL, FULL) fp32  e4m3 (FULL, FULL) fp32  float32
wgrad    e5m2 (FULL, FULL) fp32  e4m3 (FULL, FULL) fp32  float32

Recipe rowwise (weight for dgrad: recompute)
GEMM     first operand        second operand       accumulation
forward  e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  fast
dgrad    e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  float32
wgrad    e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  float32

Recipe rowwise_wgrad_hp (weight for dgrad: recompute)
GEMM     first operand        second operand       accumulation
forward  e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  fast
dgrad    e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  float32
wgrad    high precision       high precision

Recipe blockwise (weight for dgrad: recompute)
GEMM     first operand       second operand        accumulation
forward  e4m3 (1, 128) fp32  e4m3 (128, 128) fp32  float32
dgrad    e4m3 (1, 128) fp32  e4m3 (128, 128) fp32  float32
wgrad    e4m3 (1, 128) fp32  e4m3 (1, 128) fp32    float32

Recipe mxfp8 (weight for dgrad: recompute)
GEMM     first operand            second operand           accumulation
forward  e4m3 (1, 32) e8m0_rceil  e4m3 (1, 32) e8m0_rceil  float32
dgrad    e4m3 (1, 32) e8m0_rceil  e4m3 (1, 32) e8m0_rceil  float32
wgrad    e4m3 (1, 32) e8m0_rceil  e4m3 (1, 32) e8m0_rceil  float32

Recipe mine (weight for dgrad: save)
GEMM     first operand        second operand       accumulation
forward  high precision       high precision
dgrad    e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  float32
wgrad    e4m3 (1, FULL) fp32  e4m3 (1, FULL) fp32  float32""",
    )


def test_the_named_recipes_are_those_of_the_table() -> None:
    assert list(RECIPES) == ["tensorwise", "rowwise", "rowwise_wgrad_hp", "blockwise", "mxfp8"]
    assert [r.name for r in RECIPES.values()] == list(RECIPES)
    assert list(RECIPES.values()) == [TENSORWISE, ROWWISE, ROWWISE_WGRAD_HP, BLOCKWISE, MXFP8]


def test_what_does_not_fit_is_refused_when_it_is_built() -> None:
    expecttest = pytest.importorskip("expecttest")
    row, block = Cast("e4m3", (1, FULL)), Cast("e4m3", (1, 128))
    gemm = Gemm(row, row)
    wrong: list[Callable[[], Any]] = [
        lambda: Cast("e4m3fn", (1, FULL)),  # type: ignore[arg-type]
        lambda: Cast("e4m3", (1,)),
        lambda: Cast("e4m3", (1, FULL, 1)),
        lambda: Cast("e4m3", (0, FULL)),
        lambda: Cast("e4m3", (1, -2)),
        lambda: Cast("e4m3", [1, 128]),  # type: ignore[arg-type]
        lambda: Cast("e4m3", (1, 128.0)),  # type: ignore[arg-type]
        lambda: Cast("e4m3", (1, 32), "e8m0"),
        lambda: Gemm(row, block),
        lambda: Gemm(Cast("e4m3", (FULL, 1)), Cast("e4m3", (FULL, 1))),
        lambda: Gemm(row, row, "no"),  # type: ignore[arg-type]
        lambda: Recipe(["mine"], gemm, gemm, gemm),  # type: ignore[arg-type]
        lambda: Recipe("mine", gemm, gemm, gemm, "keep"),  # type: ignore[arg-type]
        lambda: Recipe("mine", gemm, None, gemm, "save"),
        lambda: dataclasses.replace(ROWWISE, weight_for_dgrad=True),
    ]
    messages = []
    for build in wrong:
        with pytest.raises(ValueError) as refusal:
            build()
        messages.append(str(refusal.value))
    expecttest.assert_expected_inline(
        wrapped(*messages),
        """\
kind='e4m3fn' must be 'e4m3' or 'e5m2'
block=(1,) must be a tuple of two ints, (rows, contraction), such as (1, 128)
block=(1, -1, 1) must be a tuple of two ints, (rows, contraction), such as (1, 128)
block (0, FULL) holds 0; every entry must be a positive size or float8.FULL (-1)
block (1, -2) holds -2; every entry must be a positive size or float8.FULL (-1)
block=[1, 128] must be a tuple of two ints, (rows, contraction), such as (1, 128)
block=(1, 128.0) must be a tuple of two ints, (rows, contraction), such as (1, 128)
scale_mode 'e8m0' is unknown; choose one of fp32, pow2, e8m0_floor, e8m0_even, e8m0_ceil,
    e8m0_rceil
operands with blocks (1, FULL) and (1, 128) cannot be multiplied: the second entry is the
    contraction's, and must be the same size above 1, or FULL, in both
operands with blocks (FULL, 1) and (FULL, 1) cannot be multiplied: the second entry is the
    contraction's, and must be the same size above 1, or FULL, in both
fast_accum='no' must be True or False
name=['mine'] must be a string
weight_for_dgrad='keep' must be 'recompute' or 'save'
weight_for_dgrad='save' keeps an FP8 weight for dgrad, but dgrad is in high precision
weight_for_dgrad=True must be 'recompute' or 'save'""",
    )


def test_recipes_are_values() -> None:
    rebuilt = Recipe(**{f.name: getattr(ROWWISE, f.name) for f in dataclasses.fields(Recipe)})
    assert rebuilt == ROWWISE
    assert rebuilt is not ROWWISE
    assert hash(rebuilt) == hash(ROWWISE)
    assert len({*RECIPES.values(), rebuilt}) == 5
    for recipe in RECIPES.values():
        for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)):
            assert other == recipe
            assert hash(other) == hash(recipe)
    for part, field in ((ROWWISE, "forward"), (ROWWISE.forward, "a"), (ROWWISE.forward.a, "kind")):  # type: ignore[union-attr]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, None)


def test_a_recipe_is_customised_by_replacing_its_parts() -> None:
    assert MXFP8.forward is not None
    floor = dataclasses.replace(MXFP8.forward.a, scale_mode="e8m0_floor")
    mine = dataclasses.replace(MXFP8, name="mine", forward=Gemm(floor, floor), wgrad=None)
    assert mine != MXFP8
    assert mine.dgrad is MXFP8.dgrad
    assert MXFP8.forward.a.scale_mode == "e8m0_rceil"
    assert [plan and plan.impl for plan in mine.plan(CPU)] == ["torch", "torch", None]


def dtypes(recipe: Recipe, device: torch.device = CPU) -> list[str]:
    return [
        "-"
        if plan is None
        else f"{plan.a.dtype} {plan.b.dtype} {plan.impl}".replace("torch.float8_", "")
        for plan in recipe.plan(device)
    ]


def test_plans_on_a_cpu() -> None:
    assert dtypes(TENSORWISE) == [
        "e4m3fn e4m3fn torch",
        "e5m2 e4m3fn torch",
        "e5m2 e4m3fn torch",
    ]
    assert dtypes(ROWWISE_WGRAD_HP) == ["e4m3fn e4m3fn torch", "e4m3fn e4m3fn torch", "-"]
    row = CastPlan((1, FULL), torch.float8_e4m3fn, "fp32")
    assert ROWWISE.plan(CPU)[0] == Plan(row, row, fast_accum=True, impl="torch")
    nothing = Recipe("off", None, None, None)
    assert nothing.plan(CPU) == (None, None, None)


def test_a_device_that_nobody_knows_is_emulated_in_fn() -> None:
    assert dtypes(TENSORWISE, torch.device("meta"))[1] == "e5m2 e4m3fn torch"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_assumed_device_gives_the_formats_and_the_reference(recipe: Recipe, arch: str) -> None:
    fnuz = arch == "gfx942"
    with float8.assume_device(arch):
        plans = recipe.plan(CPU)
    for plan, gemm in zip(plans, (recipe.forward, recipe.dgrad, recipe.wgrad), strict=True):
        assert (plan is None) == (gemm is None)
        if plan is not None and gemm is not None:
            for planned, cast in ((plan.a, gemm.a), (plan.b, gemm.b)):
                suffix = "fnuz" if fnuz else "fn" if cast.kind == "e4m3" else ""
                assert str(planned.dtype) == f"torch.float8_{cast.kind}{suffix}"
                assert planned.block == cast.block
                assert planned.scale_mode == cast.scale_mode
            assert plan.fast_accum == gemm.fast_accum
            assert plan.impl == "torch"
    assert "fnuz" not in str(recipe.plan(CPU))


PLANS = {
    "sm_90": {
        "tensorwise": "cublas cublas cublas",
        "rowwise": "cublas cublas cublas",
        "rowwise_wgrad_hp": "cublas cublas None",
        "blockwise": "cublas cublas cublas",
        "mxfp8": "torch_bf16 torch_bf16 torch_bf16",
    },
    "sm_100": {
        "tensorwise": "cublas cublas cublas",
        "rowwise": "cublas cublas cublas",
        "rowwise_wgrad_hp": "cublas cublas None",
        "blockwise": "triton triton triton",
        "mxfp8": "cublas cublas cublas",
    },
    "gfx942": {
        "tensorwise": "cublas cublas cublas",
        "rowwise": "cublas cublas cublas",
        "rowwise_wgrad_hp": "cublas cublas None",
        "blockwise": "triton triton triton",
        "mxfp8": "triton triton triton",
    },
    "gfx950": {
        "tensorwise": "cublas cublas cublas",
        "rowwise": "cublas cublas cublas",
        "rowwise_wgrad_hp": "cublas cublas None",
        "blockwise": "triton triton triton",
        "mxfp8": "triton triton triton",
    },
}


@pytest.mark.parametrize("arch", PLANS)
def test_plans_of_devices_that_this_machine_is_not(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = describe(arch)
    monkeypatch.setattr(devices, "device_profile", lambda device: profile)
    monkeypatch.setattr("float8.recipe.device_profile", lambda device: profile)
    monkeypatch.setattr(matmul, "device_profile", lambda device: profile)
    got = {
        name: " ".join("None" if plan is None else plan.impl for plan in recipe.plan(CPU))
        for name, recipe in RECIPES.items()
    }
    assert got == PLANS[arch]
    plan = TENSORWISE.plan(CPU)[1]
    assert plan is not None
    assert (plan.a.dtype == torch.float8_e5m2fnuz) == (arch == "gfx942")
