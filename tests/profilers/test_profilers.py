"""Profilers by themselves: what they record and report."""

from __future__ import annotations

import pickle
import pstats
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hasten._lib.rank_zero import rank_zero_only
from hasten.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from hasten.profilers import simple as simple_module
from hasten.profilers.simple import LOOP, part_of
from tests.refusals import refused


class Clock:
    """Time that only goes by where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(simple_module, "time", clock)
    return clock


def spend(profiler: Profiler, clock: Clock, action: str, seconds: float, *inside: Any) -> None:
    with profiler.profile(action):
        clock.now += seconds
        for what in inside:
            spend(profiler, clock, *what)


def rows(report: str) -> dict[str, list[str]]:
    """Return the cells of each row of all tables of a report, by the first."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "|" in line]
    return {cells[0]: cells[1:] for cells in found}


# -- simple


def test_simple_reports_durations_calls_and_shares(clock: Clock) -> None:
    profiler = SimpleProfiler()
    spend(profiler, clock, "a", 1.0, ("b", 0.5))
    spend(profiler, clock, "a", 2.0)
    assert profiler.recorded_durations == {"a": [1.5, 2.0], "b": [0.5]}
    assert profiler.current_actions == {}
    clock.now += 0.5
    report = profiler.summary()
    assert report.startswith("Profiler Report\n")
    assert rows(report) == {
        "Action": ["Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"],
        "Total": ["-", "3", "4.0", "100 %"],
        "a": ["1.75", "2", "3.5", "87.5"],
        "b": ["0.5", "1", "0.5", "12.5"],
    }
    assert report.index("|  a ") < report.index("|  b ")  # What took longest comes first.
    # Lightning's columns, which programs parse.
    assert "\n|  a     \t|  1.75           \t|  2              \t|  3.5            \t|  87.5           \t|\n" in report
    assert "Where the time" not in report  # There was no run.
    spend(profiler, clock, "b", 4.0)
    profiler.extended = False
    report = profiler.summary()
    assert rows(report) == {
        "Action": ["Mean duration (s)", "Total time (s)"],
        "a": ["1.75", "3.5"],
        "b": ["2.25", "4.5"],
    }
    assert report.index("|  b ") < report.index("|  a ")


def test_what_does_not_match_is_refused_and_an_error_ends_its_action() -> None:
    for profiler, not_open in ((SimpleProfiler(), "ab"), (AdvancedProfiler(), "b")):
        with pytest.raises(ZeroDivisionError), profiler.profile("a"):
            raise ZeroDivisionError
        for action in not_open:
            with refused(ValueError, says=f"({action})"):
                profiler.stop(action)
    simple = SimpleProfiler()
    simple.start("a")
    with pytest.raises(ValueError, match="Attempted to start a which has already started"):
        simple.start("a")
    for restriction in (-1, 1.5, -0.5, True, "all"):
        with refused(ValueError, "line_count_restriction"):
            AdvancedProfiler(line_count_restriction=restriction)  # type: ignore[arg-type]
    advanced = AdvancedProfiler(dump_stats=True)
    with advanced.profile("a") as name:
        assert name == "a"
    with refused(ValueError, "dump_stats", says="dirpath="):
        advanced.summary()


PART_OF = {
    "data wait": ("[_TrainingEpochLoop].train_dataloader_next", "[_EvaluationLoop].val_next"),
    "transfer": (
        "[Strategy]SingleDeviceStrategy.batch_to_device",
        "[LightningModule]Net.on_after_batch_transfer",
        "[LightningDataModule]Data.transfer_batch_to_device",
    ),
    "forward": ("[Strategy]DDPStrategy.training_step", "[Strategy]DDPStrategy.predict_step"),
    "backward": ("[Strategy]DDPStrategy.backward", "[LightningModule]Net.backward"),
    "optimizer": (
        "[LightningModule]Net.optimizer_step",
        "[LightningModule]Net.optimizer_zero_grad",
        "[LightningModule]Net.configure_gradient_clipping",
        "[LightningModule]Net.lr_scheduler_step",
    ),
    "callbacks": ("[Callback]Mine{'a': 1}.on_train_batch_end", "[LightningModule]Net.on_train_batch_end"),
    "logging": ("[Logging]publish_step",),
    "checkpoint": ("save_checkpoint",),
    "validation": ("run_evaluation",),
    "other": ("run_training_epoch",),
    None: ("my own save_checkpoint",),
}


def test_every_action_has_its_part() -> None:
    assert {part: tuple({part_of(one) for one in actions}) for part, actions in PART_OF.items()} == {
        part: (part,) for part in PART_OF
    }


def test_the_parts_sum_to_the_time_of_the_loop(clock: Clock) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit", local_rank=0)
    step = ("[Strategy]S.training_step", 1.0, ("my own", 0.5), ("[Logging]record", 0.25))
    backward, update = ("[Strategy]S.backward", 2.0), ("[LightningModule]N.optimizer_step", 4.0)
    batch = ("run_training_batch", 0.125, step, backward, update)
    saving = ("[Callback]C.on_train_epoch_end", 0.5, ("save_checkpoint", 3.0))
    hook = ("[Callback]C.on_validation_end", 1.0)
    checking = ("run_evaluation", 1.0, ("[Strategy]S.validation_step", 6.0), hook)
    wait = ("[_TrainingEpochLoop].train_dataloader_next", 0.5)
    move = ("[Strategy]S.batch_to_device", 0.75)
    epoch = ("run_training_epoch", 0.25, wait, move, batch, wait, move, batch, checking)
    spend(profiler, clock, "[Callback]C.setup", 50.0)
    spend(profiler, clock, LOOP, 10.0, epoch, saving)
    report = rows(profiler.summary())
    assert {name: cells for name, cells in report.items() if name in simple_module.PARTS} == {
        "data wait": ["1.0", "2.5", "500.000"],
        "transfer": ["1.5", "3.8", "750.000"],
        "forward": ["3.0", "7.5", "1500.000"],
        "backward": ["4.0", "10.0", "2000.000"],
        "optimizer": ["8.0", "20.0", "4000.000"],
        "callbacks": ["0.5", "1.2", "250.000"],
        "logging": ["0.5", "1.2", "250.000"],
        "checkpoint": ["3.0", "7.5", "1500.000"],
        "validation": ["8.0", "20.0", "4000.000"],
        "other": ["0.5", "1.2", "250.000"],
        "start and end": ["10.0", "25.0", "5000.000"],
    }
    total = sum(profiler.recorded_durations[LOOP])
    assert report["total"][0] == str(total)
    assert sum(float(report[part][0]) for part in simple_module.PARTS) == total


def test_each_run_has_a_table_of_its_own(clock: Clock) -> None:
    profiler = SimpleProfiler()
    for stage, seconds in (("fit", 7.0), ("validate", 2.0)):
        profiler.setup(stage, local_rank=0)
        spend(profiler, clock, LOOP, 1.0, ("[Strategy]S.validation_step", seconds))
        profiler.teardown(stage)
    report = profiler.summary()
    assert report.startswith("VALIDATE Profiler Report")
    table = rows(report)
    assert table["forward"] == ["2.0", "66.7"]
    assert table["other"] == ["1.0", "33.3"]
    assert table["total"] == ["3.0", "100.0"]
    assert table["[Strategy]S.validation_step"][1] == "2"  # The actions are those of all runs.


def test_an_action_that_ends_out_of_turn(clock: Clock) -> None:
    profiler = SimpleProfiler()
    profiler.start(LOOP)
    profiler.start("[Callback]C.on_train_batch_start")
    profiler.start("[Logging]record")
    clock.now += 1.0
    profiler.stop("[Callback]C.on_train_batch_start")
    clock.now += 2.0
    profiler.stop("[Logging]record")
    clock.now += 4.0
    profiler.stop(LOOP)
    table = rows(profiler.summary())
    assert (table["logging"][0], table["start and end"][0]) == ("3.0", "4.0")


# -- the base


def test_the_report_is_a_message_of_the_first_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = SimpleProfiler()
    with profiler.profile("a"):
        pass
    profiler.describe()
    assert "|  a " in caplog.text
    caplog.clear()
    profiler.setup("fit", local_rank=1)
    assert profiler.local_rank == 1
    profiler.describe()
    monkeypatch.setattr(rank_zero_only, "rank", 2)
    profiler.setup("fit", local_rank=0)
    profiler.describe()
    assert caplog.text == ""


def test_the_report_is_written_to_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path / "folder", filename="times")
    for _ in range(2):
        profiler.setup("fit", local_rank=0, log_dir="/nowhere")
        profiler.describe()
    assert caplog.text == ""
    text = (tmp_path / "folder" / "fit-times-0.txt").read_text()
    assert text.count("FIT Profiler Report") == 2  # Of both runs.
    beside_logs = SimpleProfiler(filename="times")
    beside_logs.setup("test", local_rank=0, log_dir=str(tmp_path))
    beside_logs.describe()
    assert (tmp_path / "test-times-0.txt").exists()


def test_profilers_travel_to_another_process() -> None:
    profiler = SimpleProfiler(filename="times")
    profiler.lightning_module = lambda: None  # cannot be sent
    copy = pickle.loads(pickle.dumps(profiler))
    assert (copy.filename, copy.lightning_module) == ("times", None)
    advanced = AdvancedProfiler(line_count_restriction=5)
    with advanced.profile("a"):
        pass
    again = pickle.loads(pickle.dumps(advanced))
    assert (again.line_count_restriction, again.profiled_actions) == (5, {})


# -- advanced


def inner() -> int:
    return sum(number for number in range(50))


def outer() -> int:
    return len([None] * 3)


def test_advanced_keeps_the_functions_of_each_action_over_several_starts() -> None:
    profiler = AdvancedProfiler()
    with profiler.profile("outside"):
        outer()
        with profiler.profile("inside"):
            inner()
        time.sleep(0)
    with profiler.profile("outside"):
        outer()
    profiler.stop("outside")  # once more: it has ended
    stats: Any = pstats.Stats(profiler.profiled_actions["outside"]).stats  # type: ignore[attr-defined]
    assert [entry[0] for key, entry in stats.items() if key[2] == "outer"] == [2]
    report = profiler.summary()
    first, second = report.split("Profile stats for: inside")
    assert report.startswith("Profiler Report\nProfile stats for: outside")
    assert "(outer)" in first
    assert "(inner)" not in first
    assert "built-in method time.sleep" in first  # The outer one goes on after the inner one.
    assert "(inner)" in second
    assert "time.sleep" not in second


def test_advanced_reports_as_many_lines_as_asked() -> None:
    def lines(restriction: float) -> int:
        profiler = AdvancedProfiler(line_count_restriction=restriction)
        with profiler.profile("a"):
            inner()
            outer()
        return len(re.findall(r"^ +\d+ +\d", profiler.summary(), re.MULTILINE))

    assert lines(1.0) > 3
    assert lines(2) <= 3
    assert lines(2) < lines(1.0)


def test_advanced_writes_profiles(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="f", dump_stats=True)
    with profiler.profile("[Callback]A/b: {'x': 1}*?"):
        outer()
    profiler.describe()
    path = tmp_path / "f-[Callback]A_b_ {'x'_ 1}_.prof"
    assert "outer" in {key[2] for key in pstats.Stats(str(path)).stats}  # type: ignore[attr-defined]
    assert "(outer)" in (tmp_path / "f.txt").read_text()
    assert profiler.profiled_actions == {}
