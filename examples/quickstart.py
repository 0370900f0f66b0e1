"""FP8 training in fifteen lines; then two weights that are not those of an nn.Linear.

    python examples/quickstart.py                      a minute on a CPU
    python examples/quickstart.py --backend inductor   compiled to machine code (default on a GPU)

The models predict a byte from the 16 before it, in source files of the PyTorch that is installed.
`train` and `part_1` are the fifteen lines: convert, compile, train. In `part_2` a layer multiplies
a parameter by itself: it is trained as a Float8Weight, then frozen and stored in FP8 (one byte per
value) while a low-rank product beside it learns another file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import GELU, Embedding, Flatten, Linear, Sequential

import float8


def train(model: nn.Module, data: Tensor, steps: int, backend: str) -> Iterator[float]:
    """An ordinary training in bf16 autocast; gives each step's loss, in nats per byte."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(steps):
        batch = data[torch.randint(len(data), (256,), device=data.device)].long()
        with torch.autocast(data.device.type, torch.bfloat16):
            loss = F.cross_entropy(compiled(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def part_1(data: Tensor, steps: int, backend: str) -> list[float]:
    """A model of nn.Linears."""
    model = Sequential(Embedding(256, 32), Flatten(), Linear(512, 512), GELU(), Linear(512, 256))
    print(float8.convert(model.to(data.device), keep=("4",)))  # all layers but the logits
    losses = list(train(model, data, steps, backend))
    print(float8.summary(model))  # who multiplied
    return losses


class Gated(nn.Module):
    """[B, 512] to [B, 512]. It has one parameter, and no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(1024, 512) * 512**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (x @ self.both.t()).chunk(2, dim=-1)
        return value * F.silu(gate)


class Adapted(Gated):
    """A Gated layer with its weight frozen in FP8, and a trainable product of rank 8 beside it."""

    def __init__(self, layer: Gated) -> None:
        super().__init__()
        # A block of 128 x 128 holds rows and columns alike: forward and dgrad multiply in FP8.
        stored = float8.quantize(layer.both.detach(), block=(128, 128))
        self.both = nn.Parameter(stored, requires_grad=False)
        self.down = Linear(512, 8, bias=False, device=stored.device)
        self.up = Linear(8, 1024, bias=False, device=stored.device)
        nn.init.zeros_(self.up.weight)  # so it starts as the layer that it adapts

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (F.linear(x, self.both) + self.up(self.down(x))).chunk(2, dim=-1)
        return value * F.silu(gate)


def part_2(data: Tensor, other: Tensor, steps: int, backend: str) -> dict[str, Any]:
    """Train a Gated model on `data`, then adapt it to `other`."""
    model = Sequential(Embedding(256, 32), Flatten(), Gated(), Linear(512, 256))
    model.to(data.device)
    # A pattern that names a parameter says that it multiplies: no rule could tell.
    print(float8.convert(model, {"both": float8.ROWWISE}))
    trained = list(train(model, data, steps, backend))
    print(f"It is a {type(model[2].both).__name__}; the state dict holds plain tensors:")
    print("  ", {name: type(t).__name__ for name, t in model.state_dict().items()})

    float8.revert(model)
    model.requires_grad_(False)
    layer = model[2] = Adapted(model[2])
    before = layer.both.qdata.view(torch.uint8).clone()
    adapted = list(train(model, other, steps, backend))
    unchanged = torch.equal(before, layer.both.qdata.view(torch.uint8))
    print(f"Frozen: {layer.both!r},\n   its bytes {'unchanged' if unchanged else 'CHANGED'}")
    return {"trained": trained, "adapted": adapted, "layer": layer, "unchanged": unchanged}


def told(losses: list[float]) -> str:
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per byte in {len(losses)} steps"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Both parts: {"part_1": losses, "part_2": what part_2 returns}."""
    parser = argparse.ArgumentParser(
        prog="quickstart.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--steps", type=int, default=100, help="per training (default: 100)")
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--backend", help="of torch.compile (default: inductor; CPU: aot_eager)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: it must be at least 1")
    device = torch.device(args.device)
    backend = args.backend or ("aot_eager" if device.type == "cpu" else "inductor")
    torch.manual_seed(0)

    def windows(path: str | None) -> Tensor:
        """Every 17 bytes in a row of a file: uint8 [bytes - 16, 17]."""
        text = torch.frombuffer(bytearray(Path(str(path)).read_bytes()), dtype=torch.uint8)
        return text.to(device).unfold(0, 17, 1)

    data, other = windows(F.__file__), windows(torch.linalg.__file__)
    print(f"1. Fifteen lines, on {device}, compiled by {backend}")
    losses = part_1(data, args.steps, backend)
    print(f"{told(losses)}\n\n2. A weight in a module of your own, then frozen beside an adapter")
    result = part_2(data, other, args.steps, backend)
    print(f"Trained: {told(result['trained'])}\nAdapted to another file: {told(result['adapted'])}")
    return {"part_1": losses, "part_2": result}


if __name__ == "__main__":
    main()
