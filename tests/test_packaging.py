"""The wheel: built from a copy of the tree, looked into, and imported from an empty folder."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("pyproject.toml", "README.md", "LICENSE", "float8", "kernels", "dispatch", "tests")


def setuptools_version() -> int:
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network from the files that a user gets."""
    if setuptools_version() < 77:
        pytest.skip("building a wheel needs setuptools 77 or newer")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("building a wheel needs pip")
    tree = tmp_path_factory.mktemp("tree")
    no_caches = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_symlink():
            (tree / name).symlink_to(source.readlink())
        elif source.is_dir():
            shutil.copytree(source, tree / name, ignore=no_caches)
        elif source.exists():
            shutil.copy(source, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), str(tree)]
    done = subprocess.run(command, cwd=out, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("float8-*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.partition("/")[0].endswith(".dist-info")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "float8").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert names == sources
    assert {name for name in names if name.startswith("float8/kernels/")}
    assert {name for name in names if name.startswith("float8/dispatch/")}


def test_wheel_needs_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra" not in line]
    assert required == ["Requires-Dist: torch>=2.11"]


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """From an empty folder; device code and integrations need packages that may be absent."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        files = [Path(name) for name in archive.namelist() if name.endswith(".py")]
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if not file.stem.endswith(("_triton", "_hopper", "__main__"))
        and "integrations" not in file.parts
    ]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        f"for name in {modules!r}: print(importlib.import_module(name).__file__)"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()
    assert len(loaded) == len(modules)
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in loaded), loaded
