"""Processes that were started again meet, although the store still holds what dead ones left there."""

from __future__ import annotations

import itertools
import threading
import uuid
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.refusals import refused

from hasten.machine import collectives, rendezvous
from hasten.machine.cluster import find_free_port
from hasten.machine.rendezvous import Party, agree_on_name, store_of_this_attempt
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy
from hasten.strategies.parallel import TIMEOUT


def meet(store: dist.Store, ranks: list[int], world_size: int) -> list[str]:
    """Return the names on which threads in the place of processes agree, in the order of ``ranks``."""
    names = dict.fromkeys(ranks, "")

    def join(rank: int) -> None:
        names[rank] = agree_on_name(store, Party(rank, world_size, timedelta(seconds=30)))

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
    with refused(RuntimeError, says=("rank 1", "0 s")):
        agree_on_name(store, Party(0, 2, timedelta(seconds=0.2)))
    first, second = meet(store, [0, 1], 2)
    assert first == second


def test_without_an_earlier_attempt_torch_s_own_store_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_of_this_attempt(Party(0, 2, timedelta(seconds=1))) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_of_this_attempt(Party(0, 2, timedelta(seconds=1))) is None


def test_who_is_missing_is_printed_while_the_others_wait_and_named_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "NEXT_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store, timeout = dist.HashStore(), timedelta(seconds=0.8)
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))
    second = threading.Thread(target=suppressed, args=(store, Party(1, 6, timeout, per_machine=2)))
    second.start()
    with refused(RuntimeError, says=("1 s", "rank 0", "10.0.0.1:29500")):
        rendezvous.meet(store, Party(0, 6, timeout, per_machine=2))
    second.join()
    lines = capfd.readouterr().err.splitlines()
    # One process prints for all.
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("hasten: rank 0 has waited ")
        assert line.endswith("all of machine 1 (ranks 2 to 3), all of machine 2 (ranks 4 to 5).")
        assert "10.0.0.1:29500" in line


def suppressed(store: dist.Store, party: Party) -> None:
    with suppress(RuntimeError):
        rendezvous.meet(store, party)


def test_a_first_process_that_is_missing_is_named_by_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    with refused(RuntimeError, says=("rank 0", "rank 1")):
        rendezvous.store_of_first("127.0.0.1", find_free_port(), Party(1, 2, timedelta(seconds=0.2)))


def test_who_started_the_processes_says_whether_those_that_are_missing_live() -> None:
    party = Party(0, 3, timedelta(0), started_by_hasten=True)
    with refused(RuntimeError, says="0 s") as caught:
        rendezvous.meet(dist.HashStore(), party)
    assert "Start all processes" not in str(caught.value)
    rendezvous.note_who_lives(caught.value, {1: True, 2: False})
    assert [note.partition("started by this program, ")[2] for note in caught.value.__notes__] == [
        "is alive and has not reached this call.",
        "has ended.",
    ]


@pytest.mark.parametrize(
    ("given", "waited"), [(timedelta(seconds=5), TIMEOUT), (timedelta(hours=1), timedelta(hours=1))]
)
def test_a_short_timeout_of_a_strategy_is_for_steps_and_not_for_the_start(
    given: timedelta, waited: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties: list[Party] = []
    monkeypatch.setattr(collectives, "join", lambda party, **_: parties.append(party))
    runtime(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=given)).strategy.setup_environment()
    assert parties[0].timeout == waited
