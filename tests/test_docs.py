"""The documentation is true: its Python runs, its output is real, its refusals are raised.

The blocks of a page run in order, in one namespace, in a folder of their own. In a page,

    <!-- test: code -->       runs too, and a reader does not see it
    <!-- skip: reason -->     the next block does not run
    ```text after ```python   is what that block prints

The tables of docs/refusals.md are checked row by row: the call, in a fresh namespace made by the
page's blocks, raises that error with that text (which goes on where the row has an ellipsis).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import html
import io
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from float8.dispatch.table import HANDLERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
REFUSALS = ROOT / "docs" / "refusals.md"

# What README.md leaves to a reader: a model, a batch and a loss.
README_SETUP = """
import dataclasses, torch, float8
from torch import nn

class Transformer(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        mlp = lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp()}) for _ in range(2))
        self.mix, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 16)
    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](self.mix(x))
        return self.lm_head(x)

model, config, batch = Transformer(), None, torch.randn(64, 32)
another = Transformer()
micro_batches, loss = [batch, batch], lambda y: y.square().mean()
train = lambda model: loss(model(batch)).backward()
x, weight, bias = torch.randn(64, 256), torch.randn(96, 256), torch.zeros(96)
w8 = float8.quantize(weight, block=(128, 128))
"""
# Its blocks stand alone: each converts a model that is not converted yet.
README_AGAIN = ("report = float8.convert(model", "model = Transformer()")


class Block(NamedTuple):
    """A piece of a page that runs. `prints` is the text block after it, if there is one."""

    line: int  # of its first line of code
    code: str
    prints: str | None


_COMMENT = re.compile(r"<!-- (test|skip):(.*?)-->", re.DOTALL)
_FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BESIDE = re.compile(r"(import torch {4,})import torch$", re.MULTILINE)


def blocks(text: str) -> Iterator[Block]:
    found = sorted([*_COMMENT.finditer(text), *_FENCE.finditer(text)], key=re.Match.start)
    skip, end = False, 0
    for i, match in enumerate(found):
        kind, body = match.groups()
        line = text.count("\n", 0, match.start(2)) + 1
        if match.start() < end:  # within another one
            continue
        end = match.end()
        if kind == "skip":
            assert body.strip(), f"line {line}: a reason is missing"
            skip = True
        elif kind == "test":
            yield Block(line, body.strip() + "\n", None)
        elif (kind == "python" or _BESIDE.match(body)) and not skip:
            after = found[i + 1] if i + 1 < len(found) else None
            follows = after is not None and after.group(1) == "text"
            adjoins = follows and not text[match.end() : after.start()].strip()  # type: ignore[union-attr]
            yield Block(line, body, after.group(2) if adjoins else None)  # type: ignore[union-attr]
        skip = skip and kind == "skip"


def columns(code: str) -> list[str]:
    """Code as it is; or, where a block shows two programs side by side, the two."""
    beside, lines = _BESIDE.match(code), code.splitlines()
    if beside is None:
        return [code]
    at = beside.end(1)
    return ["\n".join(line[:at].rstrip() for line in lines), "\n".join(line[at:] for line in lines)]


def execute(page: Path, block: Block, code: str, namespace: dict[str, Any]) -> str:
    """Run a block statement by statement; what it prints. Errors name the line of the page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for statement in ast.parse(code).body:
            source = ast.get_source_segment(code, statement) or ""
            if page.name == "README.md" and source.startswith(README_AGAIN[0]):
                exec(README_AGAIN[1], namespace)
            ast.increment_lineno(statement, block.line - 1)
            exec(compile(ast.Module([statement], []), str(page), "exec"), namespace)
    return out.getvalue()


def without_padding(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder, the dispatch table as it was, and a torch.compile that is quick."""
    before = dict(HANDLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    HANDLERS.clear()
    HANDLERS.update(before)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    if page.name == "README.md":
        exec(README_SETUP, namespace)
    for block in blocks(page.read_text()):
        for code in columns(block.code):
            torch.manual_seed(0)
            printed = execute(page, block, code, namespace)
        if block.prints is not None:
            assert without_padding(printed) == without_padding(block.prints), f"{page}:{block.line}"


def test_the_op_that_is_added_refuses_what_it_would_cut() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    code = next(b.code for b in blocks(page) if "implements" in b.code)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    with pytest.raises(NotImplementedError, match="would be cut"):
        namespace["x8"].flip(1)


# ------------------------------------------------------------------------------------ refusals


class Row(NamedTuple):
    line: int
    call: str
    error: str
    text: str
    advice: str


def rows() -> list[Row]:
    found = []
    for number, line in enumerate(REFUSALS.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            call, error, text, advice = cells
            found.append(
                Row(number, call.strip("`"), error.strip("`"), html.unescape(text), advice)
            )
    return found


def raised(row: Row) -> Exception | None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(REFUSALS.read_text()):
        exec(block.code, namespace)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on grads of leaves and the like
            exec(row.call, namespace)
    except Exception as error:
        return error
    return None


@functools.cache
def outcomes() -> dict[Row, Exception | None]:
    return {row: raised(row) for row in rows()}


def test_refusals_are_raised_as_the_table_says() -> None:
    assert len(rows()) > 80
    wrong = []
    for row, error in outcomes().items():
        actual = " ".join(str(error).split())
        begins = row.text.endswith("…") and actual.startswith(row.text[:-1].rstrip())
        if type(error).__name__ != row.error or not (begins or actual == row.text):
            wrong.append(f"line {row.line}: {row.call}\n    {type(error).__name__}: {actual}")
    assert not wrong, "docs/refusals.md says otherwise:\n" + "\n".join(wrong)


def test_refusals_say_what_to_do() -> None:
    assert [row.line for row in rows() if not row.advice] == []


# Modules whose every refusal has a row; what is not listed here is a tool with a page of its own.
LISTED = (
    "cache convert formats devices scaling recipe tensor linear grouped mlp permute totals weight "
    "dispatch/copy dispatch/grouped dispatch/matmul dispatch/shape dispatch/table dispatch/value "
    "kernels/fused kernels/grouped kernels/matmul kernels/permute kernels/quantize "
    "kernels/quantize_grouped"
).split()
# They need a process group, as in tests/test_convert.py, tests/test_totals.py and
# tests/test_weight.py, or torch.compile, whose tracing no profiler sees: tests/test_compile.py.
NEED_MORE = (
    "DistributedDataParallel averages",
    "in code that torch.compile traces",
    "has a sharded Float8Weight",
    "has a sharded weight",
    "is sharded; call unwrap_parameter",
)


def sites(module: str) -> Iterator[tuple[int, int, str]]:
    """First line, last line and source of every statement of a module that refuses something."""
    source = (ROOT / "float8" / f"{module}.py").read_text()
    for node in ast.walk(ast.parse(source)):
        raises = isinstance(node, ast.Raise) and node.exc is not None
        calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        name = getattr(node.value.func, "id", "") if calls else ""  # type: ignore[attr-defined]
        if raises or name in ("refuse", "misfit"):
            assert node.end_lineno is not None  # type: ignore[attr-defined]
            yield node.lineno, node.end_lineno, ast.get_source_segment(source, node) or ""  # type: ignore[attr-defined]


def test_every_refusal_has_a_row() -> None:
    seen: set[tuple[str, int]] = set()
    for error in outcomes().values():
        while error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            seen |= {(frame.filename, frame.lineno or 0) for frame in frames}
            error = error.__cause__  # type: ignore[assignment]
    lacking = []
    for module in LISTED:
        file = str(ROOT / "float8" / f"{module}.py")
        for first, last, source in sites(module):
            hit = any((file, line) in seen for line in range(first, last + 1))
            if not hit and not any(text in source for text in NEED_MORE):
                lacking.append(f"float8/{module}.py:{first}: {' '.join(source.split())[:120]}")
    assert not lacking, "docs/refusals.md has no row for\n" + "\n".join(lacking)


# ------------------------------------------------------------------------------------ the site


def test_navigation_names_every_page() -> None:
    named = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in PAGES} - named == set()


def test_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: make docs")
    # Not --quiet, which keeps the warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
