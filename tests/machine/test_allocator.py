"""Trainer(allocator=...): pages that stay with the process, and what cannot be had."""

from __future__ import annotations

import sys

import pytest
from tests.models import Classifier, loader, quiet
from tests.programs import run_python

import hasten as L
from hasten.machine import allocator

# Counts the pages the system hands out for twenty blocks of 40 MiB, one after the other: with and without keeping.
COUNT = """
import resource
import torch
from hasten.machine.allocator import kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(40 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = faults()
with kept("keep"):
    faults()
    during = faults()
print(before, during, faults())
"""

needs_glibc = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")


@needs_glibc
def test_kept_pages_are_used_again_and_given_back_afterwards() -> None:
    done = run_python("-c", COUNT)
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.split())
    # 20 blocks of 10,240 pages (fewer where the system gives huge ones), or hardly any.
    assert before > 100
    assert during < before / 40
    # Given back, the pages are fresh ones again: of all twenty blocks, or of the first, whose place the others take.
    assert after > before / 40


@needs_glibc
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_keeps_pages_while_it_lasts(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    keep, give_back = allocator._keep, allocator._give_back
    monkeypatch.setattr(allocator, "_keep", lambda owner: (seen.append("keep"), keep(owner))[1])
    monkeypatch.setattr(allocator, "_give_back", lambda library: (seen.append("back"), give_back(library)))

    class Counting(Classifier):
        def training_step(self, batch, batch_idx):
            if not batch_idx:
                seen.append("step")
            if fails:
                raise KeyError("a user's mistake")
            return super().training_step(batch, batch_idx)

    trainer = quiet(allocator="keep")
    if fails:
        with pytest.raises(KeyError):
            trainer.fit(Counting(), loader())
    else:
        trainer.fit(Counting(), loader())
    assert seen == ["keep", "step", "back"]


def test_an_allocator_that_is_not_loaded_is_told_with_the_line_that_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "file_of", lambda name: f"/usr/lib/lib{name}.so.4")
    with pytest.raises(ValueError, match=r"LD_PRELOAD=/usr/lib/libtcmalloc.so.4.*allocator='keep'"):
        quiet(allocator="tcmalloc").fit(Classifier(), loader())
    monkeypatch.setattr(allocator, "file_of", lambda name: None)
    with pytest.raises(ValueError, match=r"no libjemalloc.*apt install libjemalloc2"):
        quiet(allocator="jemalloc").fit(Classifier(), loader())


def test_an_allocator_of_its_own_keeps_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "preloaded", lambda: "jemalloc")
    monkeypatch.setattr(allocator, "_keep", lambda owner: pytest.fail("the C library was changed"))
    quiet(allocator="jemalloc").fit(Classifier(), loader())
    quiet(allocator="keep").fit(Classifier(), loader())


def test_another_allocator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Trainer\(allocator='mimalloc'\).*use one of 'keep', 'tcmalloc'"):
        L.Trainer(allocator="mimalloc")  # type: ignore[arg-type]
