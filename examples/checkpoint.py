"""Checkpoints of a training: a folder of <recipe>.pt, plain tensors and numbers only.

`torch.load(path, weights_only=True)` reads them, with or without float8: "model" is the state dict
of the plain GPT, "optimizer" AdamW's, "rng" torch's, "record" the log so far. The position in the
data needs no entry, for the batch of a step follows from the seed and the step (data.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from report import Record
from torch import nn

State = dict[str, Any]


def save(folder: Path, record: Record, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    on_gpu = torch.cuda.is_available()
    state = {
        "record": record,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "rng_cuda": torch.cuda.get_rng_state() if on_gpu else None,
    }
    write(folder, state)


def save_record(folder: Path, record: Record) -> None:
    """Keep a finished run's curve, not its weights: enough to go on with the recipes after it."""
    write(folder, {"record": record, "model": None})


def write(folder: Path, state: State) -> None:
    """All of it or nothing: a crash while writing leaves the checkpoint of before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{state['record']['recipe']}.pt"
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def set_aside(folder: Path, recipes: list[str]) -> None:
    """A training that starts anew keeps the checkpoints of an earlier one, as <recipe>.old."""
    for recipe in recipes:
        path = folder / f"{recipe}.pt"
        if path.exists():
            os.replace(path, path.with_suffix(".old"))
            print(f"{path}: kept as {recipe}.old, since this training starts anew")


def load(folder: Path, record: Record, steps: int) -> State | None:
    """What was saved for the recipe of a new, empty record; None if its turn had not come.

    Raises ValueError when the folder has no checkpoint, when its training was another one (recipes,
    model, text, seed, ...), or when there are no weights to train on to `steps`.
    """
    path = folder / f"{record['recipe']}.pt"
    if not path.exists():
        refuse_foreign_recipe(folder, record["recipe"])
        return None
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    before, now = state["record"]["settings"], record["settings"]
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in names)
        raise ValueError(
            f"--resume {path}: that was another training ({changes}); "
            "give the flags it was started with, or start anew without --resume"
        )
    done = len(state["record"]["rows"])
    if state["model"] is None and done < steps:
        raise ValueError(
            f"--resume {path}: {done} steps were trained and the weights not kept; "
            f"ask for --steps {done}, or start anew, with --save"
        )
    return state


def refuse_foreign_recipe(folder: Path, recipe: str) -> None:
    """A recipe without a checkpoint starts anew, if the training in `folder` meant to get to it."""
    saved = sorted(folder.glob("*.pt"))
    if not saved:
        raise ValueError(f"--resume {folder}: there is no checkpoint (<recipe>.pt) in this folder")
    planned = torch.load(saved[0], map_location="cpu", weights_only=True)["record"]["planned"]
    if recipe not in planned:
        raise ValueError(
            f"--resume {folder}: that was a training of {' '.join(planned)}, without {recipe}; "
            "leave this recipe out, or start anew without --resume"
        )


def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["rng_cuda"] is not None:
        torch.cuda.set_rng_state(state["rng_cuda"])
