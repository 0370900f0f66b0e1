"""Text as bytes, with nothing to download: by default the running Python's standard library.

A byte is a token (vocabulary 256). Files are read in the order of their paths, so the same folder
gives the same bytes; the sha256 of what was read goes into every log and checkpoint. The last tenth
is held out for validation.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 64 * 2**20  # bytes read at most
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library: no tests, no installed packages."""
    files = files_below(Path(sysconfig.get_path("stdlib")), skip=NOT_LIBRARY)
    return [path for path in files if path.suffix == ".py"]


def files_below(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """The files below a folder in the order of their paths; no hidden ones, none in `skip`."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=Path.as_posix)


def read_files(paths: list[Path], limit: int = LIMIT) -> bytes:
    """The bytes of one file after another, up to `limit`; nothing beyond it is read."""
    text = bytearray()
    for path in paths:
        if len(text) == limit:
            break
        with path.open("rb") as file:
            text += file.read(limit - len(text))
    return bytes(text)


def windows(tokens: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens after them: int64 [len(starts), seq_len] each."""
    first = torch.tensor(starts, device=tokens.device)[:, None]
    window = tokens[first + torch.arange(seq_len + 1, device=tokens.device)].long()
    return window[:, :-1], window[:, 1:]


@dataclass(frozen=True)
class Text:
    """Bytes to train and to validate on: uint8, on the training device."""

    source: str
    sha256: str
    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, path: str | None, seq_len: int, device: torch.device) -> Text:
        """Read a file, a folder, or (None) the standard library.

        Raises ValueError when there is nothing at `path`, when it cannot be read, or when the
        held-out tenth is shorter than one sequence.
        """
        source = "the standard library's source" if path is None else path
        if path is None:
            files = standard_library()
        elif os.path.isdir(path):
            files = files_below(Path(path))
        elif os.path.exists(path):
            files = [Path(path)]
        else:
            raise ValueError(f"--data {path}: there is no such file or folder")
        try:
            text = read_files(files)
        except OSError as error:
            raise ValueError(f"--data {path}: it cannot be read ({error})") from error
        needed = 10 * (seq_len + 1)
        if len(text) < needed:
            raise ValueError(
                f"{source}: {len(text)} bytes of text are too few; with --seq-len {seq_len} at "
                f"least {needed} are needed, since a tenth is held out"
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        cut = len(text) - len(text) // 10
        return cls(source, hashlib.sha256(text).hexdigest(), tokens[:cut], tokens[cut:])

    def batch(self, key: str, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Random windows of the training part, int64 [batch_size, seq_len]: tokens, next tokens.

        The key alone ("seed/step/micro-batch") decides which: no state to save, none to restore.
        """
        draw = random.Random(key)
        last = len(self.train) - seq_len - 1
        starts = [draw.randint(0, last) for _ in range(batch_size)]
        return windows(self.train, starts, seq_len)

    def validation_batches(
        self, count: int, batch_size: int, seq_len: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows spread evenly over the held-out part: the same for every seed and recipe."""
        last, total = len(self.validation) - seq_len - 1, count * batch_size
        starts = [last * i // total for i in range(total)]
        for i in range(0, total, batch_size):
            yield windows(self.validation, starts[i : i + batch_size], seq_len)
