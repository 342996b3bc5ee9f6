"""Trainer(allocator=...): pages that stay with the process, and what cannot be had."""

from __future__ import annotations

import sys

import pytest
from tests.models import Classifier, loader, quiet
from tests.programs import run_python
from tests.refusals import refused

import hasten as L
from hasten.machine import allocator

# Counts the pages the system hands out for twenty blocks of 40 MiB, one after the other: before, in and after a run.
COUNT = """
import resource
import torch
from tests.models import Classifier, loader, quiet

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(40 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

class Counting(Classifier):
    def training_step(self, batch, batch_idx):
        faults()
        print(faults())
        raise KeyError("a mistake of the user")

faults()
print(faults())
try:
    quiet(allocator="keep").fit(Counting(), loader())
except KeyError:
    print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_a_run_uses_kept_pages_again_and_returns_them_even_after_an_error() -> None:
    done = run_python("-c", COUNT)
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.split())
    # 20 blocks of 10,240 pages (fewer where the system gives huge ones), or hardly any.
    assert before > 100
    assert during < before / 40
    # After the run the pages are new again: of all twenty blocks, or of the first, whose place the others take.
    assert after > before / 40


def test_an_allocator_that_is_not_loaded_is_refused_with_the_way_to_load_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "file_of", lambda name: f"/usr/lib/lib{name}.so.4")
    with refused(ValueError, "allocator", fix="LD_PRELOAD=/usr/lib/libtcmalloc"):
        quiet(allocator="tcmalloc").fit(Classifier(), loader())
    monkeypatch.setattr(allocator, "file_of", lambda name: None)
    with refused(ValueError, "allocator", fix="libjemalloc2"):
        quiet(allocator="jemalloc").fit(Classifier(), loader())


def test_an_allocator_of_its_own_keeps_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "preloaded", lambda: "jemalloc")
    monkeypatch.setattr(allocator, "_keep", lambda owner: pytest.fail("the C library was changed"))
    quiet(allocator="jemalloc").fit(Classifier(), loader())
    quiet(allocator="keep").fit(Classifier(), loader())


def test_another_allocator_is_refused() -> None:
    with refused(ValueError, "allocator"):
        L.Trainer(allocator="mimalloc")  # type: ignore[arg-type]
