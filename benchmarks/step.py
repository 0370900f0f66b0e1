"""A whole training step of a model in the shape of Llama 3: forward, loss, backward, AdamW.

Letters: L layers, B sequences, T tokens of each, D model width, H heads, G heads of keys and
values, F hidden width. Weights, gradients and AdamW's two averages are bf16. The model is that of
examples/gpt.py, whose tokens are bytes: embedding and head are next to nothing, blocks are all.
Each contender holds a model and an optimiser (5.3 GB of 4 layers of Llama 3 8B) for the whole run;
gradients and activations are memory that all share.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import float8

from . import peers
from .layers import near
from .registry import Bench, Call, Contender, Options, Outputs, Shape, compiled, named_shapes

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig

SQNR_FLOOR = 12.0  # dB; gradients of queries and keys that passed four blocks in e5m2 reach 18
LEARNING_RATE = 1e-6  # so small that a call finds the weights of the check, however late it comes


def build(shape: Shape, device: torch.device) -> tuple[GPT, Tensor, Tensor]:
    """A model, tokens and the tokens to predict, random."""
    layers, b, t, d, h, g, f = shape
    with torch.device(device):
        model = GPT(GPTConfig(layers, d, h, f, kv_heads=g)).to(torch.bfloat16)
        tokens, targets = torch.randint(model.config.vocab, (2, b, t))
    return model, tokens, targets


def training_step(model: GPT, tokens: Tensor, targets: Tensor) -> Call:
    """A call that trains once on the same batch, and returns the loss and all gradients."""
    on_gpu = tokens.is_cuda
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True, capturable=on_gpu
    )

    def step() -> Outputs:
        loss = model(tokens, targets)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), *(grad for grad in grads if grad is not None)

    return step


def compile_blocks(model: GPT) -> None:
    """Each block by itself, all with one compilation."""
    forward = compiled(Block.forward)
    for block in model.blocks:
        block.forward = types.MethodType(forward, block)  # type: ignore[method-assign]


def make_step(base: GPT, tokens: Tensor, targets: Tensor, convert: Callable[[GPT], object]) -> Call:
    """The step of a converted and compiled copy of ``base``."""
    model = copy.deepcopy(base)
    convert(model)
    compile_blocks(model)
    return training_step(model, tokens, targets)


def convert_to(name: str, fuse: bool, model: GPT) -> None:
    report = float8.convert(model, float8.RECIPES[name], fuse=fuse)
    assert len(report.fused) == (len(model.blocks) if fuse else 0), report


def convert_peer(name: str, model: GPT) -> None:
    peers.convert(name, model.blocks)  # not the head, which float8.convert keeps too


def contenders(shape: Shape, options: Options) -> dict[str, Contender]:
    base, tokens, targets = build(shape, options.device)
    expected = training_step(copy.deepcopy(base), tokens, targets)()
    check = partial(near, expected, floor=SQNR_FLOOR)
    step = partial(make_step, base, tokens, targets)

    found = {"bf16": Contender(partial(step, lambda model: None), check, line=True)}
    for name in options.recipes:
        plans = float8.RECIPES[name].plan(options.device)
        by = list(dict.fromkeys("bf16" if plan is None else plan.impl for plan in plans))
        if "torch" in by and tokens.is_cuda:
            continue  # emulated: seconds for a step
        for fuse in (False, True)[: 1 + (None not in plans)]:
            found[f"fused {name}" if fuse else name] = Contender(
                partial(step, partial(convert_to, name, fuse)),
                check,
                ours=True,
                line=True,
                note=f"GEMMs by {', '.join(by)}",
            )
    if options.peer:
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            found[f"torchao {name}"] = Contender(
                partial(step, partial(convert_peer, name)), check, line=True
            )
    return found


SHAPES = named_shapes(  # L B T D H G F; 4 of a model's 32 or 80 layers
    {
        "llama3-8b": "1x8192 4x1x8192x4096x32x8x14336, 4x2048 4x4x2048x4096x32x8x14336",
        "llama3-70b": "1x8192 2x1x8192x8192x64x8x28672",
    },
    default=("llama3-8b 1x8192",),
)

BENCHES = [
    Bench("step/compiled", contenders, SHAPES, (2, 2, 32, 64, 4, 2, 128), baseline="bf16"),
]
