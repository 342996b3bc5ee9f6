"""The examples in the docstrings are programs: they run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

from hasten.extend.origin import ROOTS

SOURCE = Path(__file__).resolve().parents[2] / "src"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    """Return the modules whose text holds an example; only those need be imported."""
    return [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for root in sorted(ROOTS)
        for path in sorted((SOURCE / root).rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


MODULES = modules_with_examples()


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Where an example writes, it writes here.
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    # seed_everything leaves the seed there; transformers prints that wandb is offline.
    with mock.patch.dict(os.environ, {"WANDB_MODE": "disabled" if "transformers" in name else "offline"}):
        for test in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(test, out=report.append, clear_globs=True)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0
