"""Train a small mixture-of-experts GPT in bf16 and in FP8 on the same batches, and compare.

    python examples/train_moe.py                         tiny, bf16 and rowwise, for two CPU cores
    python examples/train_moe.py --recipe bf16 tensorwise rowwise rowwise_wgrad_hp blockwise mxfp8
    python examples/train_moe.py --assume-device gfx942  FP8 as AMD's MI300 has it (FNUZ), emulated
    python examples/train_moe.py --preset small --compile                             for a GPU

All but the layers is train_gpt.py's: its flags, logs, checkpoints, plot and table. In each block a
`float8.MoE` takes the place of the MLP: the same `float8.convert(model, recipe)` finds the experts,
which then run as one call, and leaves the routers in float32. The loss that is trained, logged and
compared has --balance times the mean loss of balance added; the held-out loss has not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import train_gpt  # sets up threads, before torch is imported

# isort: split
import torch
from gpt import GPT, Block, GPTConfig
from torch import Tensor

import float8


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """``hidden`` is the width of one expert."""

    experts: int = 8
    top_k: int = 2
    shared: int | None = None  # hidden width of an expert for all tokens
    balance: float = 0.01


class MoEBlock(Block):
    def __init__(self, config: MoEConfig) -> None:
        sizes = dict(experts=config.experts, top_k=config.top_k, shared_hidden=config.shared or 0)
        super().__init__(config, float8.MoE(config.dim, config.hidden, **sizes))

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Also the loss of balance."""
        x = x + self.attention(self.attention_norm(x), angles)
        y, balance, _ = self.mlp(self.mlp_norm(x))
        return x + y, balance


class MoEGPT(GPT):
    block = MoEBlock
    config: MoEConfig

    @torch.no_grad()
    def init_weights(self) -> None:
        super().init_weights()
        for block in self.blocks:
            block.mlp.router.weight.normal_(std=self.config.dim**-0.5)
            for name, weight in block.mlp.experts.named_parameters():
                scale = self.residual_scale if name == "down_proj" else 1.0
                weight.normal_(std=scale * weight.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x, angles = self.embed(tokens)
        losses = []
        for block in self.blocks:
            x, balance = block(x, angles)
            losses.append(balance)
        y = self.head(x, targets)
        if targets is None or not torch.is_grad_enabled():
            return y
        return y + self.config.balance * torch.stack(losses).mean()

    def flops_per_token(self, seq_len: int) -> int:
        """GPT's, of the weights that a token meets: k of its experts, and the router."""
        c = self.config
        met = c.top_k * 3 * c.dim * c.hidden + c.experts * c.dim
        return super().flops_per_token(seq_len) + 6 * c.layers * met


@dataclass(frozen=True)
class Preset(train_gpt.Preset):
    experts: int = 8
    top_k: int = 2
    shared: int | None = None
    balance: float = 0.01

    def model(self) -> GPT:
        return MoEGPT(
            MoEConfig(
                self.layers,
                self.dim,
                self.heads,
                self.hidden,
                kv_heads=self.kv_heads,
                experts=self.experts,
                top_k=self.top_k,
                shared=self.shared,
                balance=self.balance,
            )
        )


PRESETS = {
    "tiny": Preset(2, 128, 4, 128, seq_len=64, batch_size=8, steps=120, warmup=20, lr=2e-3),
    # Blocks as in DeepSeekMoE: many narrow experts, and one for all tokens.
    "small": Preset(10, 1024, 8, 768, seq_len=1024, batch_size=32, steps=500, warmup=50, lr=6e-4,
                    experts=32, top_k=4, shared=768),
}  # fmt: skip
EXAMPLE = train_gpt.Example(__file__, __doc__, PRESETS, "MoE")


def main(argv: list[str] | None = None) -> dict[str, object]:
    """As of train_gpt.py."""
    return train_gpt.main(argv, EXAMPLE)


if __name__ == "__main__":
    sys.exit(any(record["stopped"] for record in main()["runs"].values()))
