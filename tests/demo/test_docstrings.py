"""The docstrings task: real texts, read without running anything, and nothing leaks from training to test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.refusals import refused

from hasten_tools.demo import text as demo_text
from hasten_tools.demo.task import RowVariant
from hasten_tools.demo.text import Docstrings, docstrings_of, split_docstrings
from hasten_tools.demo.text_models import find
from hasten_tools.speed.safety import Safety

from .conftest import silent

LONG = "A sentence that is long enough to be kept, of which each has a number of its own, so that none is dropped: "


def library(folder: Path, modules: int) -> Path:
    for module in range(modules):
        body = "\n".join(
            f'def function_{number}():\n    """{LONG}{folder.name}, {module}, {number}."""' for number in range(6)
        )
        folder.mkdir(exist_ok=True)
        (folder / f"module_{module}.py").write_text(f'"""{LONG}the same in every module."""\n{body}\n')
    return folder


def test_files_are_parsed_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        f'"""{LONG}module."""\nraise SystemExit\nclass A:\n    """{LONG}class."""\n\n'
        f'    async def f(self):\n        """{LONG}method."""\n\ndef short():\n    """Short."""\n'
    )
    assert [text.rpartition(" ")[2] for text in docstrings_of(path)] == ["module.", "class.", "method."]
    path.write_text("this is not Python")
    assert docstrings_of(path) == []


def test_training_and_test_share_no_module_and_no_text(tmp_path: Path) -> None:
    folders = {name: library(tmp_path / name, 8) for name in ("one", "two")}
    train, test = split_docstrings(folders, train=12, test=6)
    assert (len(train), len(test)) == (24, 12)
    assert [sum(label == each for _, label in train) for each in (0, 1)] == [12, 12]
    texts = [text for text, _ in train + test]
    assert len(set(texts)) == len(texts)
    modules = [{tuple(text.split(": ")[1].split(", ")[:2]) for text, _ in part} for part in (train, test)]
    assert not modules[0] & modules[1]
    assert split_docstrings(folders, train=12, test=6) == (train, test)


@pytest.fixture(scope="module")
def task() -> Docstrings:
    return Docstrings(find("minilm", random_weights=True), say=silent)


def test_the_installed_libraries_have_enough_texts(task: Docstrings) -> None:
    assert len(task.train_data) == 5 * demo_text.TRAIN
    assert len(task.test_data) == 5 * demo_text.TEST
    labels = task.train_data.tokens.labels
    assert labels.bincount().tolist() == [demo_text.TRAIN + demo_text.TEST] * 5
    # As padded by the tutorial; most of it is not text.
    assert 0.15 < task.text_share < 0.5
    batch = next(iter(task.users_loader(RowVariant())))
    assert batch["input_ids"].shape == (8, 512)


def test_libraries_are_found_without_being_imported() -> None:
    before = set(sys.modules)
    assert (demo_text.find_sources("numpy") / "__init__.py").is_file()
    assert (demo_text.find_sources("python") / "ast.py").is_file()
    assert set(sys.modules) == before
    with refused(ModuleNotFoundError, says=("nowhere", "[demo]")):
        demo_text.find_sources("nowhere")


def test_rows_draw_nothing_at_random_so_packing_changes_rounding_only(task: Docstrings) -> None:
    model = task.model(RowVariant())
    assert all(module.p == 0 for module in model.modules() if hasattr(module, "p"))
    safety = {row.name: row.safety for row in task.rows}
    assert safety["packed"] == safety["last block for one token"] == Safety.ROUNDING
    assert all(row.same_maths for row in task.rows)


def test_a_limit_leaves_so_many_texts_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(f"{LONG}{number}", number % 5) for number in range(40)]
    monkeypatch.setattr(demo_text, "split_docstrings", lambda folders, train, test: (texts, texts[:10]))
    limited = Docstrings(find("minilm", random_weights=True), limit=16, say=silent)
    assert len(limited.train_data) == 16
    assert "16 train / 10 test from other modules" in limited.title
    assert limited.full_seconds is None
    assert limited.steps(RowVariant()) == 2
