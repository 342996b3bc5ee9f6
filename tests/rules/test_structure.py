"""Limits on how the package is built, measured by ``scripts/structure.py``. The numbers here may only fall.

``python scripts/structure.py --list private`` (or ``any``, ``results``, ``classes``, ``walks``) names what is counted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_LINES_PER_FILE = 900
MOST_FILES_PER_PACKAGE = 14
ONE_FILE_EACH = {"callbacks", "loggers"}  # One file for each callback and for each logger.

# Uses of a private name of another package.
MOST_PRIVATE_ACCESSES = 0

# Parameters and results of public functions that are bare `Any` or not annotated, in percent. The aim is 3.
MOST_UNTYPED_PARAMETERS = 3.6
MOST_UNTYPED_RESULTS = 5.7

# Files in which functions run.
WALKS = {"batch": 5, "logged value": 3, "save": 8, "restore": 8, "Fabric.setup": 5}


def load_script() -> Any:
    """Import ``scripts/structure.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module  # Where dataclasses look for it.
    spec.loader.exec_module(module)
    return module


structure = load_script()


@pytest.fixture(scope="module")
def sources() -> list[Any]:
    found: list[Any] = structure.read_sources(ROOT)
    return found


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n[tests/rules/test_structure.py] {text}")


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("src", "tests", "benchmarks", "scripts", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES_PER_FILE} == {}


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


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    found: dict[str, list[str]] = structure.walks(ROOT)
    return found


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_passes_through_few_files(name: str, walks: dict[str, list[str]]) -> None:
    files = walks[name]
    assert files, "nothing was recorded"
    assert len(files) <= WALKS[name], f"{len(files)} files run: {', '.join(files)}"


@pytest.mark.parametrize("name", WALKS)
def test_the_documented_walk_names_each_file_that_runs(name: str, walks: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert sorted(set(walks[name]) - set(structure.documented_walks(page)[name])) == [], (
        "run: python scripts/structure.py --write-walks"
    )


# The measures themselves


def read(tmp_path: Path, **files: str) -> list[Any]:
    """Write files, ``room__name="text"``, as a package and read them."""
    for name, text in files.items():
        path = tmp_path / "src" / "hasten" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found: list[Any] = structure.read_sources(tmp_path)
    return found


def test_code_lines_are_without_comments_docstrings_and_blank_lines(tmp_path: Path) -> None:
    (source,) = read(tmp_path, a='"""Module.\n\nMore."""\n\n# comment\nx = """one\ntwo"""\n')
    assert structure.code_lines(source) == 2
    assert len(structure.docstring_lines(source.tree)) == 3


def test_private_accesses_are_found_across_packages_only(tmp_path: Path) -> None:
    sources = read(
        tmp_path,
        trainer__trainer="class Trainer:\n    def __init__(self):\n        self._run = 1\n        self._own = 2\n",
        trainer__other="def f(trainer):\n    return trainer._run\n",
        loops__fit=(
            "class Fit:\n    def __init__(self, trainer):\n        self._run = trainer._run\n"
            "        self.own = getattr(trainer, '_own', None)\n        self._here = self._run\n"
            "def g(fit, tensor):\n    return fit._here, tensor._elsewhere\n"
        ),
    )
    assert structure.private_accesses(sources) == [
        "loops/fit.py:3 trainer._run",
        "loops/fit.py:4 getattr(trainer, '_own', None)",
    ]


def test_untyped_parameters_of_public_functions_are_counted(tmp_path: Path) -> None:
    sources = read(
        tmp_path,
        a="from typing import Any\ndef f(a, b: int, *c: Any): ...\ndef _g(a): ...\n",
        b="class C:\n    def __init__(self, a: 'Any') -> None: ...\n    def m(self, a: str) -> Any: ...\n",
        _c="def f(a): ...\n",
    )
    typing = structure.typing_of(sources)
    assert typing.parameters == 5
    assert typing.untyped == ["a.py.f(a)", "a.py.f(c)", "b.py.C.__init__(a)"]
    assert typing.untyped_results == ["a.py.f", "b.py.C.m"]
