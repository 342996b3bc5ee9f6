"""Limits on how the package is built, measured by ``scripts/structure.py``. The numbers here may only fall.

``python scripts/structure.py --list private`` (or ``any``, ``results``, ``classes``, ``walks``) names what is counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.programs import load_script
from tests.rules import trees

ROOT = Path(__file__).resolve().parents[2]

MOST_FILES_PER_PACKAGE = 14
ONE_FILE_EACH = {"callbacks", "loggers"}  # One file for each callback and for each logger.

# Uses of a private name of another package.
MOST_PRIVATE_ACCESSES = 0

# Parameters and results of public functions that are bare `Any` or not annotated, in percent. The aim is 3.
MOST_UNTYPED_PARAMETERS = 2.1
MOST_UNTYPED_RESULTS = 3.9

# Files in which functions run.
WALKS = {"batch": 5, "logged value": 3, "save": 8, "restore": 8, "Fabric.setup": 5}


structure = load_script("structure")


@pytest.fixture
def sources() -> list[Any]:
    return trees.sources()


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n[tests/rules/test_structure.py] {text}")


def test_no_package_has_too_many_files(sources: list[Any]) -> None:
    counts = structure.files_per_package(sources)
    too_many = {
        name: count for name, count in counts.items() if name not in ONE_FILE_EACH and count > MOST_FILES_PER_PACKAGE
    }
    assert too_many == {}, f"a package has at most {MOST_FILES_PER_PACKAGE} files"


def test_packages_do_not_use_the_private_names_of_others(
    sources: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = structure.private_accesses(sources)
    assert len(found) <= MOST_PRIVATE_ACCESSES, "give the owner a public name instead:\n" + "\n".join(found)
    if len(found) < MOST_PRIVATE_ACCESSES - 5:
        say(capsys, f"MOST_PRIVATE_ACCESSES can be lowered to {len(found)}")


def test_public_functions_are_typed(sources: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    typing = structure.typing_of(sources)
    parameters = 100 * len(typing.untyped) / typing.parameters
    results = 100 * len(typing.untyped_results) / typing.functions
    assert parameters <= MOST_UNTYPED_PARAMETERS
    assert results <= MOST_UNTYPED_RESULTS
    if parameters < MOST_UNTYPED_PARAMETERS - 0.5 or results < MOST_UNTYPED_RESULTS - 0.5:
        say(capsys, f"untyped: {parameters:.1f} % of the parameters, {results:.1f} % of the results")


def test_no_two_classes_share_a_name(sources: list[Any]) -> None:
    assert structure.duplicate_classes(sources) == {}


def test_a_walk_passes_through_few_files_and_the_documentation_names_them() -> None:
    documented = structure.documented_walks((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    for name, files in structure.walks(ROOT).items():
        assert files, f"nothing was recorded: {name}"
        assert len(files) <= WALKS[name], f"{name}: {len(files)} files run: {', '.join(files)}"
        assert set(files) <= set(documented[name]), "run: python scripts/structure.py --write-walks"


# The measures themselves


def test_private_accesses_and_untyped_parameters_are_found(tmp_path: Path) -> None:
    files = {
        "trainer/trainer.py": "class Trainer:\n    def __init__(self):\n        self._run = 1\n        self._own = 2\n",
        "trainer/other.py": "def f(trainer):\n    return trainer._run\n",
        "loops/fit.py": "def fit(trainer: object):\n    return trainer._run, getattr(trainer, '_own', None)\n",
    }
    for name, text in files.items():
        path = tmp_path / "src" / "hasten" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sources = structure.read_sources(tmp_path)
    found = ["loops/fit.py:2 getattr(trainer, '_own', None)", "loops/fit.py:2 trainer._run"]
    assert sorted(structure.private_accesses(sources)) == found
    assert structure.typing_of(sources).untyped == ["trainer/other.py.f(trainer)"]
