"""The process that the others wait for is named, in the log, in the progress line and in the record."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hasten.callbacks.progress_line import shown
from hasten.loggers import CSVLogger
from hasten.machine import signals
from hasten.machine.signals import StopRequests
from hasten.record import pace
from hasten.record import ranks as record_ranks
from hasten.record.ranks import RankTimes, Slowest, StepsDone, rank_times, slowest_of
from hasten_tools.report.ranks import rank_sentence
from tests.models import Classifier, quiet


class Processes:
    """What several processes report to each other."""

    def __init__(self, count: int) -> None:
        self.done = [StepsDone(0, 0.0, 0.0)] * count
        self.times = [RankTimes(rank, count) for rank in range(count)]
        self.found: list[Slowest] = []
        for rank, one in enumerate(self.times):
            one.begin(lambda rank=rank: self.done[rank])  # type: ignore[misc]
        self.times[0].on_report = self.found.append

    def train(self, steps: int, seconds: float, data: Sequence[float], backward: Sequence[float]) -> None:
        """Make steps of ``seconds``, of which each process waits for data and computes its backward."""
        for rank, before in enumerate(self.done):
            waited = before.waited + steps * data[rank]
            self.done[rank] = StepsDone(before.steps + steps, before.seconds + steps * seconds, waited)
            self.times[rank].add_step({"backward": backward[rank]})

    def exchange(self) -> None:
        largest = [max(column) for column in zip(*(one.values() for one in self.times), strict=True)]
        for one in self.times:
            one.take(largest)


def test_a_process_that_waits_for_data_is_the_slowest() -> None:
    processes = Processes(4)
    processes.train(10, 0.18, [0.0, 0.0, 0.0, 0.08], [0.15, 0.15, 0.15, 0.07])
    processes.exchange()
    (slowest,) = processes.found
    assert (slowest.rank, slowest.is_slow) == (3, True)
    assert (slowest.ratio, slowest.data_share) == pytest.approx((1.8, 0.08 / 0.18))
    # All know it, and how long they wait.
    assert processes.times[1].last == processes.times[0].last
    assert processes.times[0].last[0].waiting_seconds == pytest.approx(0.08)


def test_a_process_that_computes_slowly_is_the_slowest() -> None:
    # Its forward takes 0.1 s longer than that of the others, which therefore wait in their backward.
    slowest = slowest_of(rank_times([(0.4, 0.0, 0.3), (0.4, 0.0, 0.2), (0.4, 0.0, 0.3)]))
    assert (slowest.rank, slowest.data_share) == (1, 0.0)
    assert slowest.ratio == pytest.approx(0.4 / 0.3)


def test_waits_for_data_are_seen_where_no_step_can_be_timed() -> None:
    slowest = slowest_of(rank_times([(0.4, 0.01, 0.0), (0.4, 0.21, 0.0), (0.4, 0.01, 0.0)]))
    assert (slowest.rank, slowest.ratio) == (1, pytest.approx(2.0))


def test_equal_processes_are_not_named() -> None:
    processes = Processes(3)
    for _ in range(5):
        processes.train(100, 0.01, [0.001, 0.0, 0.001], [0.005, 0.005, 0.004])
        processes.exchange()
    assert not any(slowest.is_slow for slowest in processes.found)
    assert not any(map(processes.times[0].to_say, processes.found))
    # A fifth of a step of a millisecond is the noise of a machine.
    assert not slowest_of(rank_times([(0.0012, 0.0, 0.0002), (0.0012, 0.0, 0.0004)])).is_slow


def test_reports_are_of_at_least_half_a_second_and_wait_for_all_processes() -> None:
    processes = Processes(2)
    processes.train(1, 0.3, [0.0, 0.0], [0.1, 0.1])
    processes.exchange()
    assert processes.found == []
    processes.train(1, 0.3, [0.0, 0.0], [0.1, 0.1])
    late, processes.times[1]._progress = processes.times[1]._progress, None
    processes.exchange()
    assert processes.found == []
    processes.times[1]._progress = late
    processes.exchange()
    assert len(processes.found) == 1


def test_a_slow_process_is_said_once_when_it_stays_slow() -> None:
    times, slow = RankTimes(0, 4), Slowest(3, 1.8, 0.4, 0.45, 0.25)
    texts = [times.to_say(one) for one in (slow, slow, slow._replace(rank=1), slow, slow, slow, slow)]
    assert texts[:5] == [""] * 5
    assert texts[5] == (
        "Rank 3 takes 1.8 times the median of all ranks for a step (0.45 s, median 0.25 s); waits for data 40 %. "
        "The other ranks wait for it."
    )
    assert texts[6] == ""


def test_reports_travel_with_the_agreement_about_signals() -> None:
    calls: list[int] = []

    def all_reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
        calls.append(tensor.numel())
        return tensor

    stop = StopRequests(all_reduce)
    stop.agreed_now()
    stop.carried = RankTimes(1, 8)
    stop.agreed_now()
    assert calls == [3, 3 + 3 * 8]


def test_a_sentence_needs_several_reports() -> None:
    line = {"rank": 3, "slow": True, "ratio": 1.8, "data_share": 0.4}
    equal = {"rank": 1, "slow": False, "ratio": 1.02, "data_share": 0.0}
    assert rank_sentence([line, line]) == ""
    assert rank_sentence([line] * 3 + [equal] * 30) == ""
    assert rank_sentence([line] * 3 + [equal] * 3).startswith("Rank 3 was the slowest in 3 of 6 reports: 1.8 times")


class SlowOnRank1(Dataset[Any]):
    """Samples that take 20 ms on the second process, much longer than a step of a busy machine."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.02)
        return torch.ones(8), index % 2


@pytest.mark.world_size(2)
def test_the_slowest_rank_is_named_in_log_progress_line_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_SECONDS_BETWEEN_CHECKS", 0.15)
    monkeypatch.setattr(record_ranks, "_LEAST_SECONDS", 0.1)
    for name, seconds in (("_FIRST_SECONDS", 0.02), ("_SECONDS", 0.1)):
        monkeypatch.setattr(pace, name, seconds)
    said: list[str] = []
    monkeypatch.setattr(pace, "rank_zero_info", said.append)
    logger = CSVLogger(tmp_path, name="logs", version=0)
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1, logger=logger)
    trainer.fit(Classifier(), DataLoader(SlowOnRank1(), batch_size=4))
    times = trainer.current_run.observers.pace.ranks
    assert times is not None
    assert times.last[1].own_seconds > 1.5 * times.last[0].own_seconds
    if not trainer.is_global_zero:
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith("Rank 1 takes ")
    slowest = trainer.current_run.observers.pace.slowest
    assert slowest is not None
    assert slowest.rank == 1
    # The line of a fit that is over has no figures of its speed: as it was while it ran.
    monkeypatch.setattr(trainer.current_run.observers.pace, "measures", True)
    assert shown(trainer, {}, ended=True).slowest == f"rank 1 {slowest.ratio:.1f}x"
    lines = [json.loads(line) for line in (tmp_path / "logs" / "version_0" / "run.jsonl").read_text().splitlines()]
    reports = [line for line in lines if line["kind"] == "ranks"]
    assert len(reports) >= 3
    assert reports[-1]["rank"] == 1
    assert reports[-1]["data_share"] > 0.5
    assert rank_sentence(reports).startswith("Rank 1 was the slowest in ")
