"""What type checkers and editors know of the public names; ``typed_program.py`` has the results by overload."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import hasten as L

ROOT = Path(__file__).resolve().parents[2]


def test_mypy_checks_the_typed_program_with_the_library() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert settings["strict"]
    assert "tests/rules/typed_program.py" in settings["files"]
    assert (ROOT / "tests/rules/typed_program.py").is_file()


@pytest.mark.parametrize("front", [L.Trainer, L.Fabric])
def test_an_editor_completes_the_arguments(front: type) -> None:
    parameters = inspect.signature(front).parameters
    assert {"accelerator", "devices", "precision"} <= set(parameters)
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters.values())


@pytest.mark.parametrize(
    "room", ["", ".callbacks", ".loggers", ".profilers", ".strategies", ".data", ".optim", ".tuner"]
)
def test_an_editor_completes_the_names(room: str) -> None:
    package = importlib.import_module("hasten" + room)
    assert set(package.__all__) <= set(dir(package))
    source = inspect.getsource(package)
    # Editors read the source: each name stands there in an import.
    for name in package.__all__:
        assert re.search(rf"import .*\b{name}\b|^{name}\b|^\s+{name},", source, re.MULTILINE), name
