"""The promises about the tree itself: where files are, who imports whom, how much there is to read.

Most of it reads the source with `ast` and imports nothing.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "float8"

# A module may import from its own layer and from those above it in this list, never from below.
LAYERS = [
    ["formats"],
    ["devices"],
    ["scaling"],
    ["kernels.*", "dispatch.table"],
    ["tensor", "ops"],
    ["dispatch.*"],
    ["recipe"],
    ["totals", "linear", "grouped", "mlp", "experts", "permute", "weight", "moe"],
    ["sites"],
    ["cache", "convert", "monitor"],
    ["parallel.*"],
    ["integrations.*"],
    ["__init__", "__main__", "baseline", "doctor", "testing"],  # they may see everything
]
# The promise to a reader: these together are an afternoon's work, for another one of which
# dispatch/grouped.py is left, as float8/grouped.py is.
READ_IN_AN_AFTERNOON = (
    *("formats", "devices", "scaling", "recipe", "tensor", "linear"),
    *(f"dispatch.{name}" for name in ("table", "copy", "matmul", "shape", "value")),
)
LINE_BUDGET = 1500
IMPORT_SECONDS = 0.3  # beyond torch's own


def module_name(path: Path) -> str:
    """`kernels.quantize` for float8/kernels/quantize.py; `parallel` for parallel/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def matches(name: str, pattern: str) -> bool:
    """Whether a module belongs to an entry of LAYERS; a folder's own `__init__` is in its layer."""
    folder = pattern.removesuffix(".*")
    return name == folder or (folder != pattern and name.startswith(folder + "."))


def layer_of(name: str) -> int:
    exact = [rank for rank, layer in enumerate(LAYERS) if name in layer]
    found = exact or [
        rank for rank, layer in enumerate(LAYERS) if any(matches(name, entry) for entry in layer)
    ]
    assert found, f"float8.{name} has no place in LAYERS; put it into the layer it belongs to"
    return found[0]


@dataclass(frozen=True)
class Import:
    """One imported module, as written in `importer` at `line`."""

    importer: str  # module of ours, without "float8."
    line: int
    target: str  # absolute dotted name
    lazy: bool  # inside a function

    @property
    def ours(self) -> str | None:
        """The module of ours that is meant, without "float8."; None for a foreign one."""
        if self.target == "float8":
            return "__init__"
        name = self.target.removeprefix("float8.")
        return name if name != self.target else None

    def __str__(self) -> str:
        when = "inside a function " if self.lazy else ""
        path = MODULES[self.importer].relative_to(ROOT)
        return f"{path}:{self.line} {when}imports {self.target}"


def absolute(importer: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module in `from ... import`."""
    if not node.level:
        return node.module or ""
    path = MODULES[importer].relative_to(ROOT).parts[:-1]  # the package that holds the importer
    base = path[: len(path) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def targets(importer: str, node: ast.AST) -> list[str]:
    """The modules that one node imports, also through importlib with a constant name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = absolute(importer, node)
        names = [f"{base}.{alias.name}" for alias in node.names]
        # `from float8 import formats` means the module, `from float8.formats import X` a name in it
        return [n if n.removeprefix("float8.") in MODULES else base for n in names]
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func).rpartition(".")[2]
        name = node.args[0]
        if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
            return [str(name.value)]
    return []


def imports_of(module: str) -> Iterator[Import]:
    """Every import of a module of ours, those for type checkers included."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for target in dict.fromkeys(targets(module, node)):
            yield Import(module, getattr(node, "lineno", 0), target, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(MODULES[module].read_text()), False)


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def is_device_code(module: str) -> bool:
    """Whether it is a file of kernels/ that needs Triton to be imported."""
    return module.startswith("kernels.") and module.endswith(("_triton", "_hopper"))


def complaints(bad: list[Import]) -> str:
    return "\n".join(str(found) for found in bad)


# ------------------------------------------------------------------------------------- the folders


@pytest.mark.parametrize("folder", ["kernels", "dispatch"])
def test_top_level_folder_is_the_packages(folder: str) -> None:
    link = ROOT / folder
    if not link.is_symlink():
        pytest.skip("this checkout has no symbolic links; the package does not need them")
    assert not os.path.isabs(os.readlink(link))
    assert link.resolve() == PACKAGE / folder
    # With __init__.py the folder in the root would win over Hugging Face's `kernels`.
    assert not (PACKAGE / folder / "__init__.py").exists()


def test_nothing_is_imported_through_the_links() -> None:
    """`kernels.x` beside `float8.kernels.x` would be a second module, with ops of its own."""
    ours = {"kernels", "dispatch"}
    bad = []
    for top in ("float8", "tests", "examples", "benchmarks", "docs"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                else:
                    continue
                if ours & {name.partition(".")[0] for name in names}:
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bad, f"write float8.kernels or float8.dispatch in {bad}"


def test_no_module_is_loaded_under_two_names() -> None:
    """In this very process, after whatever tests ran before."""
    loaded: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(PACKAGE):
            loaded.setdefault(os.path.realpath(file), []).append(name)
    twice = {file: names for file, names in loaded.items() if len(names) > 1}
    assert not twice


# ------------------------------------------------------------------------------ who imports whom


def test_imports_point_upwards_in_the_list_of_layers() -> None:
    bad = [
        found
        for found in IMPORTS
        if found.ours is not None and layer_of(found.ours) > layer_of(found.importer)
    ]
    assert not bad, complaints(bad)


def test_imports_have_no_cycle() -> None:
    """Within a layer either direction is fine, but not both."""
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.ours in MODULES and not found.lazy:
            edges[found.importer].add(found.ours)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_own_modules_are_not_imported_inside_functions() -> None:
    """But for a kernel's Triton code, which is imported where it is launched."""
    bad = [
        found
        for found in IMPORTS
        if found.lazy
        and found.ours is not None
        and not (found.importer.startswith("kernels.") and is_device_code(found.ours))
        and found.importer != "__main__"  # a command loads what it needs
    ]
    assert not bad, complaints(bad)


def test_triton_is_imported_by_device_code_alone() -> None:
    """Or inside a function; and device code is imported where it is launched."""
    bad = [
        found
        for found in IMPORTS
        if not (found.lazy or is_device_code(found.importer))
        and (
            found.target.partition(".")[0] == "triton"
            or (found.ours is not None and is_device_code(found.ours))
        )
    ]
    assert not bad, complaints(bad)


def test_torchao_is_imported_by_its_integration_alone() -> None:
    """Or inside a function of the tools that compare with it: its import takes seconds."""
    bad = [
        found
        for found in IMPORTS
        if found.target.partition(".")[0] == "torchao"
        and found.importer != "integrations.torchao"
        and not (found.lazy and found.importer in ("testing", "__main__"))
    ]
    assert not bad, complaints(bad)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name
)
def test_a_test_file_loads_without_optional_packages(path: Path) -> None:
    """So that a machine without them skips what needs them and runs the rest."""
    optional = {
        "hypothesis",
        "matplotlib",
        "numpy",
        "rich",
        "tensorboard",
        "torchao",
        "tqdm",
        "transformers",
        "triton",
    }
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            found = optional & {name.partition(".")[0] for name in names}
            assert not found, f"line {node.lineno}: use pytest.importorskip for {found}"


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*layout, tokenize.ENDMARKER):
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - documented)


def test_core_can_be_read_in_an_afternoon() -> None:
    lines = {
        name: code_lines(path.read_text())
        for name, path in MODULES.items()
        if any(matches(name, pattern) for pattern in READ_IN_AN_AFTERNOON)
    }
    total = sum(lines.values())
    assert total <= LINE_BUDGET, f"{total} lines, {LINE_BUDGET} were promised: {lines}"


# ------------------------------------------------------------------------------ what nobody writes

VIEWS = {"t", "T", "H", "mT", "mH", "transpose", "permute", "swapaxes", "swapdims", "movedim"}
MAY_TRANSPOSE = {  # functions that may copy a transposed view, and of what
    "scaling.scale_layout": "scales, for the references; kernels write them so",
    "kernels.grouped._grouped_wgrad_reference": "a reference's float32 operand",
    "dispatch.grouped.grouped_mm": "the result of weights by tokens, which torch has contiguous",
}


def transposing_copies(tree: ast.AST) -> list[int]:
    """Lines that copy a transposed view: ``x.t().contiguous()``, ``x.mT.clone()``, ..."""
    found = []
    for node in ast.walk(tree):
        copies = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if copies and node.func.attr in ("contiguous", "clone"):
            of = node.func.value
            view = of.func if isinstance(of, ast.Call) else of
            if isinstance(view, ast.Attribute) and view.attr in VIEWS:
                found.append(node.lineno)
    return found


def test_nothing_is_transposed_by_a_copy() -> None:
    """A cast writes the layout that its product reads; a copy would be one more pass over it."""
    found = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if lines := transposing_copies(node):
                found[f"{name}.{getattr(node, 'name', '')}"] = lines
    bad = {name: lines for name, lines in found.items() if name not in MAY_TRANSPOSE}
    assert not bad, f"have the bytes written so, or multiply the view: {bad}"
    assert found.keys() == MAY_TRANSPOSE.keys()


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("y = x.t().contiguous()", True),
        ("y = f(x.mT.contiguous())", True),
        ("y = x[0].transpose(-2, -1).contiguous().view(-1)", True),
        ("y = torch.permute(x, (1, 0)).clone(memory_format=torch.contiguous_format)", True),
        ("y = x.contiguous().t()", False),
        ("y = x.mT.is_contiguous()", False),
        ("y = x[t].contiguous()", False),
    ],
)
def test_a_transposing_copy_is_seen(line: str, copies: bool) -> None:
    assert bool(transposing_copies(ast.parse(line))) is copies


# ------------------------------------------------------------------------------ what an import does

PROBE = """
import json, sys, time, warnings
import torch
before = set(sys.modules)
warnings.simplefilter("error")
start = time.process_time()  # a busy machine does not count
import float8
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "file": float8.__file__,
}))
"""


def import_float8() -> dict:
    """Import float8 in a new process, with warnings as errors, and report what it did."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "importing float8 wrote something"
    return json.loads(done.stdout)


def test_import_is_quiet_quick_and_light() -> None:
    report = import_float8()
    assert Path(report["file"]).resolve() == PACKAGE / "__init__.py"
    assert not report["cuda"], "importing float8 started CUDA"
    # torch itself may have loaded triton: only what float8 adds counts.
    added = {name.partition(".")[0] for name in report["new"]}
    assert not added & {"triton", "torchao", "kernels", "dispatch"}
    seconds = report["seconds"]
    assert seconds <= IMPORT_SECONDS, f"import float8 takes {seconds:.2f} s beyond torch's own"
