"""Processes that were started again meet, although the store still holds what dead ones left there."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import pytest
import torch.distributed as dist

from hasten.machine.rendezvous import agree_on_name, store_of_this_attempt


def meet(store: dist.Store, ranks: list[int], world_size: int) -> list[str]:
    """Return the names on which threads in the place of processes agree, in the order of ``ranks``."""
    names = dict.fromkeys(ranks, "")

    def join(rank: int) -> None:
        names[rank] = agree_on_name(store, rank, world_size, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(names.values())


def test_each_attempt_has_a_name_of_its_own_and_all_its_processes_have_it() -> None:
    store = dist.HashStore()
    names = [meet(store, ranks, len(ranks)) for ranks in ([0, 1, 2], [2, 1, 0], [0, 1], [1, 0])]
    assert [len(set(each)) for each in names] == [1, 1, 1, 1]
    assert len({each[0] for each in names}) == 4


def test_processes_that_died_while_they_met_do_not_count() -> None:
    store = dist.HashStore()
    # One died after it had a number, another one after its question.
    store.add("questions", 1)
    store.set(f"question/{store.add('questions', 1)}", uuid.uuid4().hex)
    with pytest.raises(TimeoutError, match="1 of 2 processes came within 0 s"):
        agree_on_name(store, 0, 2, timedelta(seconds=0.2))
    first, second = meet(store, [0, 1], 2)
    assert first == second


def test_without_an_earlier_attempt_torch_s_own_store_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_of_this_attempt(0, 2, timedelta(seconds=1)) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_of_this_attempt(0, 2, timedelta(seconds=1)) is None
