"""Packages from PyPI that are built on Lightning, unchanged: under `hasten run` they compute what they do there.

Needs a separate environment with tests/packages/requirements.txt; `make packages` makes it and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("HASTEN_PACKAGES_PYTHON", "")
PROGRAMS = Path(__file__).parent / "programs"
SOURCE = Path(__file__).resolve().parents[2] / "src"

# Packages that need versions of others that no other package takes; see README.md.
APART = ("rectools",)

pytestmark = pytest.mark.skipif(not PYTHON, reason="HASTEN_PACKAGES_PYTHON names no environment: make packages")


def results_of(program: Path, folder: Path, *, with_hasten: bool) -> dict[str, Any]:
    """Run a program in a new process and return what it wrote."""
    folder.mkdir()
    path = folder / "results.json"
    command = [PYTHON, *(["-m", "hasten", "run"] if with_hasten else []), str(program)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*([str(SOURCE)] if with_hasten else []), str(PROGRAMS)]),
        "PACKAGE_RESULTS": str(path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("use_*.py")))
def test_a_package_computes_under_hasten_what_it_does_under_lightning(name: str, tmp_path: Path) -> None:
    package = name.removeprefix("use_")
    if package in APART and subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} needs an environment of its own: tests/packages/README.md")
    program = PROGRAMS / f"{name}.py"
    theirs = results_of(program, tmp_path / "lightning", with_hasten=False)
    ours = results_of(program, tmp_path / "hasten", with_hasten=True)
    assert theirs.pop("trainer") in ("lightning", "pytorch_lightning")
    assert ours.pop("trainer") == "hasten_lightning"
    assert theirs.keys() == ours.keys()
    assert len(json.dumps(theirs)) > 100  # There is something to compare.
    for key, value in theirs.items():
        assert ours[key] == value, key
