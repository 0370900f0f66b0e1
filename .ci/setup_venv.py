"""Prepare .venv for `make demo`, `make test` and others: `python3 .ci/setup_venv.py GOAL ...`.

The rules:

* .venv sees the packages that the calling Python sees, also when that Python is itself a virtual
  environment. What is there and new enough is kept; nothing outside .venv is ever changed.
* torch >= the minimum in pyproject.toml is never replaced, nor is the triton that belongs to it.
* Only what is missing is installed, in the versions of constraints.txt.
* If that fails (no network), it goes on without whatever the goal can do without, and says so.
* `--pinned`, for CI: .venv sees nothing from outside and gets the versions of constraints.txt.

A stamp in .venv makes the next call quick; changing one of the files that decide undoes it.
This file uses the standard library alone and runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"

# goal -> the extra that lists its packages, those it cannot do without, what happens without others
GOALS = {
    "demo": ("examples", {"torch"}, "the demo does without"),
    "test": (
        "test",
        {"torch", "pytest"},
        "tests that need them are skipped; without pytest-xdist all run in one process",
    ),
    "lint": ("dev", {"torch", "ruff", "mypy"}, "the checks do without"),
    "docs": ("docs", {"torch", "mkdocs"}, "the pages need what mkdocs.yml names of them"),
}


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def venv_python(code: str, *args: str) -> str:
    """Run `code` in .venv, away from the checkout (whose folders are no packages); its stdout."""
    command = [str(VENV_PYTHON), "-c", code, *args]
    return subprocess.run(
        command, cwd=VENV, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout


def pip(*arguments: str) -> str:
    """Run .venv's pip; "" or, when it failed, the last lines of what it said."""
    command = [str(VENV_PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-input", *arguments],
        cwd=VENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return "\n".join(done.stdout.splitlines()[-4:]) if done.returncode else ""


# ------------------------------------------------------------------------------------- the venv


def venv_works() -> bool:
    """False when .venv is absent, or its interpreter has gone or moved."""
    try:
        return Path(venv_python("import sys; print(sys.prefix)").strip()).samefile(VENV)
    except (OSError, subprocess.CalledProcessError):
        return False


def make_venv(pinned: bool) -> None:
    """Create .venv. Unless `pinned` it sees what this interpreter sees."""
    # --system-site-packages shows the packages of the *base* interpreter, which is not what this
    # one sees when it is itself a virtual environment; then a .pth file shows them.
    nested = sys.prefix != sys.base_prefix
    options = ["--clear"] + ([] if pinned or nested else ["--system-site-packages"])
    seen = "nothing from outside" if pinned else f"what {sys.executable} sees"
    say(f"creating .venv (Python {sys.version.split()[0]}; it sees {seen})")
    command = [sys.executable, "-m", "venv", *options, str(VENV)]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        # Debian keeps ensurepip in a package of its own; without it pip may still be visible.
        subprocess.run([*command, "--without-pip"], check=True)

    if not pinned:  # before Python 3.12 a new venv gets a setuptools that would hide a newer one
        pip("uninstall", "--yes", "setuptools")

    site = Path(venv_python("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The package is used from the checkout, as with an editable install but needing no build tool;
    # by a relative path, so that a copy of the checkout uses its own.
    (site / "float8-checkout.pth").write_text(os.path.relpath(ROOT, site) + "\n")
    if not pinned:
        mine = json.loads(venv_python("import json, sys; print(json.dumps(sys.path))"))
        outside = [
            path
            for path in sys.path
            if Path(path).name in ("site-packages", "dist-packages") and path not in mine
        ]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in outside]
        if lines:
            (site / "float8-outside.pth").write_text("".join(lines))


# --------------------------------------------------------------------------------- what is missing


def read_requirements() -> dict[str, list[str]]:
    """pyproject's requirements: extra -> list of them; "" holds the core's, which is torch."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def name_of(requirement: str) -> str:
    """The normalised name that a requirement or a line of constraints.txt begins with, or ""."""
    match = re.match(r"[A-Za-z0-9][\w.-]*", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) of "2.11.0a0+git1234"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match.group().split(".")) if match else ()


def is_met(requirement: str, installed: dict[str, str]) -> bool:
    """Whether a requirement of the form `name`, `name>=version`, `...; marker` is met."""
    if "'Linux'" in requirement and sys.platform != "linux":
        return True
    version = installed.get(name_of(requirement))
    minimum = re.search(r">=\s*([\d.]+)", requirement)
    return version is not None and (not minimum or release(version) >= release(minimum.group(1)))


def installed_packages() -> dict[str, str]:
    """Every distribution that .venv sees, the one that wins an import first: name -> version."""
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps([(d.metadata['Name'], d.version) for d in m.distributions()]))"
    )
    found: dict[str, str] = {}
    for name, version in json.loads(venv_python(code)):
        if name and version:
            found.setdefault(name_of(name), version)
    return found


# ------------------------------------------------------------------------------------ installing


def constraints(missing: list[str], installed: dict[str, str], pinned: bool) -> str:
    """constraints.txt, less the pins that would replace a package which is there already."""
    lines = CONSTRAINTS.read_text().splitlines()
    if pinned:
        return "\n".join(lines)
    absent = {name_of(requirement) for requirement in missing}
    kept = ({"torch", "triton"} & installed.keys()) - absent
    lines = [line for line in lines if name_of(line) in absent or name_of(line) not in installed]
    return "\n".join(lines + [f"{name}=={installed[name]}" for name in sorted(kept)])


def pip_install(requirements: list[str], constraint_text: str, patient: bool) -> str:
    """Install into .venv; the answer is that of `pip`."""
    # A machine without network should notice soon.
    options = [] if patient else ["--retries", "1", "--timeout", "15"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text(constraint_text + "\n")
        return pip("install", *options, "--constraint", str(file), *requirements)


def import_error(name: str) -> str:
    """The last line of what went wrong when .venv imports a module; "" when it could."""
    command = [str(VENV_PYTHON), "-c", f"import {name}"]
    done = subprocess.run(command, cwd=VENV, text=True, capture_output=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def install(goal: str, pinned: bool) -> list[str]:
    """Install what `goal` lacks; the names of packages that it has to do without."""
    extra, needed, _ = GOALS[goal]
    wanted = read_requirements()
    wanted = wanted[""] + wanted[extra]
    installed = installed_packages()
    if not is_met(wanted[0], installed):  # torch: the triton that is there was that torch's
        installed.pop("triton", None)
    missing = wanted if pinned else [r for r in wanted if not is_met(r, installed)]
    if wanted[0] not in missing and not list(VENV.glob("setup-*.json")):  # said once
        say(f"keeping torch {installed['torch']}")

    # What is needed first, alone: a failure of the rest must not take it along.
    must = [r for r in missing if name_of(r) in needed]
    rest = [r for r in missing if name_of(r) not in needed]
    for requirements, patient in [(missing, True)] if pinned else [(must, True), (rest, False)]:
        if not requirements:
            continue
        say(f"installing for {goal}: {', '.join(name_of(r) for r in requirements)}")
        error = pip_install(requirements, constraints(missing, installed, pinned), patient)
        if error and patient:
            print(error, file=sys.stderr)
            break

    errors = [error for error in map(import_error, sorted(needed)) if error]
    now = installed_packages()
    lacking = [name_of(r) for r in wanted if not is_met(r, now)]
    if errors or (pinned and lacking):
        why = "; ".join(errors) or f"without {', '.join(lacking)}"
        sys.exit(
            f"setup: .venv is not fit for `{goal}` ({why}) and pip could not help. Install what is "
            "missing for the Python that make uses, or name another: make PYTHON=/path/to/python3"
        )
    return lacking


# -------------------------------------------------------------------------------------- the call


def prepare(goal: str, pinned: bool) -> None:
    """Make .venv fit for `goal`, or find by its stamp that it is."""
    deciding = b"".join(path.read_bytes() for path in (PYPROJECT, CONSTRAINTS, Path(__file__)))
    key = hashlib.sha256(deciding).hexdigest()
    stamp = VENV / f"setup-{goal}.json"
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    if done.get("key") == key:
        lacking = done["lacking"]
    else:
        lacking = install(goal, pinned)
        stamp.write_text(json.dumps({"key": key, "lacking": lacking}))
    if lacking:
        say(f"not installed: {', '.join(lacking)}; {GOALS[goal][2]}")


def main(arguments: list[str]) -> None:
    goals = [argument for argument in arguments if argument != "--pinned"]
    if not goals or not GOALS.keys() >= set(goals):
        sys.exit(f"usage: setup_venv.py [--pinned] {'|'.join(GOALS)} ...")
    if sys.version_info < (3, 10):  # noqa: UP036 (whatever `python3` is has started this)
        sys.exit(
            f"setup: float8 needs Python 3.10 or newer and {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=python3.12 ..."
        )
    os.environ.pop("PYTHONHOME", None)
    pinned = "--pinned" in arguments
    if not venv_works():
        make_venv(pinned)
    for goal in goals:
        prepare(goal, pinned)


if __name__ == "__main__":
    main(sys.argv[1:])
