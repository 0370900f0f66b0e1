"""How FP8 for one chip corrupts a training on another without an error, and what float8 refuses.

    python examples/fnuz_corruption.py              under a minute on one CPU core, no GPU needed
    python examples/fnuz_corruption.py --steps 200 --out a.png

AMD's gfx942 (MI300) has FP8 numbers of its own, "FNUZ": the largest e4m3 number is 240, not 448; a
byte is half the value that it is elsewhere; byte 0x80 is NaN, not -0. Code that was written for the
others meets no error there. A small GPT learns real text from the same weights, on the same
batches, as often as there are lines here. Operands have a scale per row in all three products.

    fp32        no FP8: what the others are compared with
    a           the mistake: scales made for 448, so that what lies beyond 240 saturates
    b           the mistake: bytes written as e4m3fn, read as e4m3fnuz
    b, no 0x80  the same where somebody cleared the NaN, but did not double the scale
    c           float8 under assume_device("gfx942")

In every step the gradient of all parameters is compared with the float32 gradient of the same
weights and the same batch: their SQNR. The mistakes are made here, in `CastLinear`; float8 refuses
them, as the end of the output shows.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from data import Text
from gpt import GPT, GPTConfig
from report import optional, print_table
from torch import Tensor, nn
from torch.func import functional_call

import float8
from float8 import E4M3FN, E4M3FNUZ, FULL
from float8.testing import sqnr

MODEL = GPTConfig(layers=2, dim=64, heads=4, hidden=176)
BATCH, SEQ_LEN, WARMUP, LR = 8, 64, 10, 3e-3
LAST = 10  # steps that the table's numbers are means of

Cast = Callable[[Tensor], tuple[Tensor, Tensor]]  # x to what is read back, and where it is spoiled


# ------------------------------------------------------------------------------------- mistakes


def scaled_for_e4m3fn(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows, contraction] with each row's maximum brought to 448, and the scales."""
    scale = (x.abs().amax(-1, keepdim=True) / E4M3FN.max).clamp(min=2.0**-126)
    return x / scale, scale


def saturated(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mistake a: no error, no NaN; the largest values of each row lose up to 46% of themselves."""
    scaled, scale = scaled_for_e4m3fn(x)
    data = scaled.clamp(-E4M3FNUZ.max, E4M3FNUZ.max).to(E4M3FNUZ.dtype)
    return data.float() * scale, scaled.abs() > E4M3FNUZ.max


def misread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mistake b: every value is halved, and a negative one that rounds to zero becomes NaN."""
    scaled, scale = scaled_for_e4m3fn(x)
    code = scaled.to(E4M3FN.dtype).view(torch.uint8)
    return code.view(E4M3FNUZ.dtype).float() * scale, code == 0x80


def misread_without_nan(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mistake b with 0x80 made a zero: every value is halved, so every product is a quarter."""
    values, spoiled = misread(x)
    return torch.where(spoiled, 0.0, values), torch.ones_like(spoiled)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: CastLinear) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.layer = layer
        return layer.operand(x) @ layer.operand(w).t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), operand = ctx.saved_tensors, ctx.layer.operand
        return operand(g) @ operand(w.t()).t(), operand(g.t()) @ operand(x.t()).t(), None


class CastLinear(nn.Linear):
    """nn.Linear without a bias; operands of its three products, [rows, contraction], are cast."""

    cast: Cast
    values = spoiled = 0  # cast so far, and how many of them the cast spoiled

    def operand(self, x: Tensor) -> Tensor:
        values, spoiled = self.cast(x)
        self.values += spoiled.numel()
        self.spoiled += int(spoiled.sum())
        return values

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x.flatten(0, -2), self.weight, self)
        return y.unflatten(0, x.shape[:-1])


def with_cast(cast: Cast) -> Callable[[GPT], object]:
    """A function that makes the layers that float8.convert would convert CastLinears."""

    def change(model: GPT) -> None:
        for layer in [m for m in model.blocks.modules() if type(m) is nn.Linear]:
            layer.__class__ = CastLinear
            layer.cast = cast

    return change


# ------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """One training. A loss or gradient that is not finite ends it, with that step as the last."""

    name: str
    losses: list[float] = field(default_factory=list)  # nats per byte
    sqnrs: list[float] = field(default_factory=list)  # of the gradient, dB
    spoiled: float | None = None  # share of the values that were cast

    @property
    def died(self) -> bool:
        return not math.isfinite(self.losses[-1]) or math.isnan(self.sqnrs[-1])


def flat(grads: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.flatten() for g in grads])


def train(name: str, change: Callable[[GPT], object], text: Text, steps: int, seed: int = 0) -> Run:
    """Train a GPT that `change` has been applied to; AdamW, as usual."""
    device = text.train.device
    torch.manual_seed(seed)
    plain = GPT(MODEL).to(device)
    torch.manual_seed(seed)
    model = GPT(MODEL).to(device)
    change(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(0.9, 0.95))
    run = Run(name)
    for step in range(steps):
        tokens, targets = text.batch(f"{seed}/{step}", BATCH, SEQ_LEN)
        loss = model(tokens, targets)
        grads = torch.autograd.grad(loss, tuple(parameters.values()))
        # The parameters of a converted model are plain: the plain model runs with them as they are.
        exact = functional_call(plain, parameters, (tokens, targets))
        exact_grads = torch.autograd.grad(exact, tuple(parameters.values()))
        run.losses.append(loss.item())
        run.sqnrs.append(sqnr(flat(grads), flat(exact_grads)))
        if run.died:
            break
        for p, grad in zip(parameters.values(), grads, strict=True):
            p.grad = grad
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
    layers = [m for m in model.modules() if isinstance(m, CastLinear)]
    if layers:
        run.spoiled = sum(m.spoiled for m in layers) / sum(m.values for m in layers)
    return run


def train_all(text: Text, steps: int, seed: int = 0) -> dict[str, Run]:
    changes: dict[str, Callable[[GPT], object]] = {
        "fp32": lambda model: None,
        "a": with_cast(saturated),
        "b": with_cast(misread),
        "b, no 0x80": with_cast(misread_without_nan),
        "c": float8.convert,
    }
    runs = {}
    for name, change in changes.items():
        began = time.perf_counter()
        device = float8.assume_device("gfx942") if name == "c" else contextlib.nullcontext()
        with device:
            run = runs[name] = train(name, change, text, steps, seed)
        end = f"{'stopped' if run.died else 'trained'} after {len(run.losses)} steps"
        print(f"{name:>10}: {end}, {time.perf_counter() - began:.0f} s", flush=True)
    return runs


# -------------------------------------------------------------------------------------- results


def last(values: list[float]) -> float:
    """Mean over the closing steps."""
    return statistics.fmean(values[-LAST:])


def decibels(value: float) -> str:
    return "exact" if value == math.inf else "NaN" if math.isnan(value) else f"{value:.1f} dB"


def table(runs: dict[str, Run]) -> list[list[str]]:
    header = ["run", "gradient's SQNR", f"last {LAST}", f"loss (last {LAST})", "above fp32"]
    lines, base = [[*header, "values spoiled"]], last(runs["fp32"].losses)
    for name, run in runs.items():
        loss = last(run.losses)
        gap = "-" if name == "fp32" or run.died else f"{loss - base:+.3f}"
        spoiled = "-" if run.spoiled is None else f"{run.spoiled:.2g}"
        first, end = decibels(run.sqnrs[0]), decibels(last(run.sqnrs))
        lines.append([name, first, end, "NaN" if run.died else f"{loss:.3f}", gap, spoiled])
    return lines


def say(text: str) -> None:
    print(textwrap.fill(text, 96, subsequent_indent="   "))


def tell(runs: dict[str, Run]) -> None:
    """What the table shows, in sentences."""
    a, b = runs["a"], runs["b"]
    gap = {name: f"{last(r.losses) - last(runs['fp32'].losses):+.3f}" for name, r in runs.items()}
    left = {name: decibels(last(r.sqnrs)) for name, r in runs.items()}
    say(
        f"a: nothing is raised. {a.spoiled:.1%} of the values lay beyond 240 and were cut, among "
        "them the largest of every row, and that in both operands of every product, layer after "
        f"layer. The gradient's SQNR ends at {left['a']}, c's at {left['c']}; the loss ends at "
        f"{gap['a']} from fp32's, c's at {gap['c']}."
    )
    end = f"is NaN in step {len(b.losses)}" if b.died else "happens to be finite"
    say(
        f"b: nothing is raised either, but the loss {end}, for {b.spoiled:.1e} of the values are "
        "NaN: small negative ones, which e4m3fn rounds to -0, byte 0x80."
    )
    say(
        "b, no 0x80: all values are halved, so a product is a quarter of itself, and the "
        f"gradient's SQNR ends at {left['b, no 0x80']} (0: as much error as gradient). At first "
        "it is the size that is wrong, which AdamW divides out again, so the loss falls all the "
        f"same: it ends at {gap['b, no 0x80']} from fp32's. A loss that falls is no evidence of "
        "right gradients."
    )


def plot(runs: dict[str, Run], path: Path) -> None:
    """The gradient's SQNR and the loss, step by step; a run that ended in NaN is a cross."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(9, 8), layout="constrained")
    quality, losses = figure.subplots(2, 1, sharex=True)
    labels = {
        "fp32": "fp32",
        "a": "a: scales for 448, saturated at 240",
        "b": "b: e4m3fn bytes read as e4m3fnuz",
        "b, no 0x80": "b without NaN: all halved",
        "c": "c: float8, as gfx942 has it",
    }
    colours = ("#000000", "#D55E00", "#CC79A7", "#E69F00", "#009E73")  # Okabe and Ito's
    for (name, run), colour in zip(runs.items(), colours, strict=True):
        for axes, values in ((quality, run.sqnrs), (losses, run.losses)):
            if run.died:
                at = (len(values) - 1, 0.05)
                label = f"{labels[name]}: NaN in step {len(values)}"
                where = axes.get_xaxis_transform()
                axes.plot(*at, "x", transform=where, color=colour, markersize=10, label=label)
            elif math.isfinite(values[0]):
                axes.plot(values, color=colour, linewidth=1.4, label=labels[name])
    quality.set(
        title=f"A small GPT in FNUZ arithmetic, {len(runs['fp32'].losses)} steps",
        ylabel="SQNR of the gradient (dB)",
    )
    losses.set(xlabel="step", ylabel="training loss (nats per byte)")
    for axes in (quality, losses):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------- refusals


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError("float8 accepted what it should refuse")


def refusals(device: torch.device) -> dict[str, str]:
    """What float8 says to the mistakes: what was asked -> its error's text."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 128, device=device), torch.randn(96, 128, device=device)
    x8 = float8.quantize(x, (1, FULL), E4M3FN)
    w8 = float8.quantize(w, (1, FULL), E4M3FNUZ)
    scale_448 = x.abs().amax(1, keepdim=True) / E4M3FN.max
    attempts: dict[str, Callable[[], object]] = {
        "b: e4m3fn times e4m3fnuz": lambda: x8 @ w8.t(),
        "b: bytes seen as the other flavour": lambda: x8.view(E4M3FNUZ.dtype),
        "b: a cast to the other flavour": lambda: x8.to(E4M3FNUZ.dtype),
        "b: both flavours in one tensor": lambda: torch.cat([x8, w8]),
        "a: scales from the data, but for 448": lambda: float8.quantize(
            x, (1, FULL), E4M3FNUZ, scale_mode="fp32", scale=scale_448
        ),
    }
    return {asked: refusal(attempt) for asked, attempt in attempts.items()}


def right_way(device: torch.device) -> None:
    """What float8 offers instead, and where its protection ends."""
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=device)
    x8 = float8.quantize(x, (1, FULL), E4M3FN)
    moved = float8.convert_format(x8, E4M3FNUZ)
    changed = int((moved.dequantize() != x8.dequantize()).sum())
    with float8.assume_device("gfx942"):
        asked = float8.quantize(x, (1, FULL), "e4m3")
    largest = asked.qdata.float().abs().max().item()
    scale_448 = x.abs().amax(1, keepdim=True) / E4M3FN.max
    by_hand = float8.quantize(x, (1, FULL), E4M3FNUZ, scale=scale_448)
    good, bad = (decibels(sqnr(t.dequantize(), x)) for t in (asked, by_hand))
    say(
        f"float8.convert_format(x8, E4M3FNUZ) brings FP8 data over; it changed {changed} of "
        f"{x.numel()} values."
    )
    say(
        'float8.quantize(x, block, "e4m3") asks the device of x and takes no maximum: on gfx942 '
        f"the data is {asked.format}, the largest is {largest:g}, the SQNR {good}."
    )
    say(
        "What stays possible is a static scale of your own that is too small: values saturate, as "
        f"the documentation of `scale` says. With scales made for 448 the SQNR is {bad}."
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """{"runs": name -> Run, "refusals": what was asked -> error's text, "plot": path or None}."""
    parser = argparse.ArgumentParser(
        prog="fnuz_corruption.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--steps", type=int, default=80, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--data", metavar="PATH", help="default: Python's standard library")
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "fnuz_corruption.png"), help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: it must be at least 1")
    device, path = torch.device(args.device), args.out
    if optional("matplotlib", f"{path} is not drawn") is None:
        path = None
    try:
        text = Text.load(args.data, SEQ_LEN, device)
    except ValueError as error:
        parser.error(str(error))
    print(f"Training a GPT of {MODEL.layers} layers on {text.source}, on {device}:")
    runs = train_all(text, args.steps, args.seed)
    print()
    print_table(table(runs))
    tell(runs)
    if path is not None:
        plot(runs, path)
        print(f"Drawn in {path}.")
    refused = refusals(device)
    print("\nWhat float8 says to the same mistakes:")
    for asked, error_text in refused.items():
        print(f"  {asked}")
        print(textwrap.indent(textwrap.fill(error_text, 90), "      "))
    right_way(device)
    return {"runs": runs, "refusals": refused, "plot": path}


if __name__ == "__main__":
    main()
