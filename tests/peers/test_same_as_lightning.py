"""Programs written from Lightning's documentation do the same under Lightning and under ``hasten run``.

``make peers`` runs these tests. They need a second Python that has Lightning, named by ``HASTEN_PEER_PYTHON``,
and are skipped without it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

PEER = os.environ.get("HASTEN_PEER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PEER, reason="HASTEN_PEER_PYTHON names no Python with Lightning: make peers")

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
CONFIG = str(HERE / "programs" / "digits.yaml")
HASTEN = [sys.executable, "-c", "import sys; from hasten.commands import main; sys.exit(main())", "run"]

LAST = "csv/version_0/checkpoints/last.ckpt"
CLI = ("image_classifier_cli.py", "--config", str(HERE / "programs" / "digits.yaml"))

# Each program: the command lines it is started with, one after the other, in one folder.
PROGRAMS: dict[str, list[tuple[str, ...]]] = {
    "gan": [("gan.py",)],
    "language model": [("language_model.py",)],
    "classifier": [
        (CLI[0], "fit", *CLI[1:]),
        (CLI[0], "validate", *CLI[1:], "--ckpt_path", LAST),
        (CLI[0], "test", *CLI[1:], "--ckpt_path", LAST),
        (CLI[0], "predict", *CLI[1:], "--ckpt_path", LAST),
    ],
}
UNBROKEN = [(CLI[0], "fit", *CLI[1:], "--trainer.max_epochs", "6")]
RESUMED = [(CLI[0], "fit", *CLI[1:]), (*UNBROKEN[0], "--ckpt_path", LAST)]

Event = list[Any]  # [who.hook, its numbers, [epoch, step]]
Row = list[Any]  # [step, {name: value}]


# -- where hasten differs on purpose


def checkpoints_last(events: list[Event]) -> list[Event]:
    """Move the module's hook before the checkpoints that were saved in the callbacks' turn."""
    out: list[Event] = []
    for event in events:
        at = len(out)
        if event[0] in ("module.on_train_batch_end", "module.on_validation_end"):
            while out[at - 1][0].endswith((".state_dict", ".on_save_checkpoint")):
                at -= 1
        out.insert(at, event)
    return out


def callbacks_before_restoring(events: list[Event]) -> list[Event]:
    """Move the restoring of the datamodule behind the hooks that see the checkpoint."""
    out: list[Event] = []
    for event in events:
        at = len(out)
        if event[0].endswith(".on_load_checkpoint") and out[at - 1][0] == "data.load_state_dict":
            at -= 1
        out.insert(at, event)
    return out


def example_left_alone(events: list[Event]) -> list[Event]:
    """Leave out the hooks of a batch that ran before training began."""
    out: list[Event] = []
    for event in events:
        if event[0] == "module.on_fit_start":
            while out[-1][0].endswith(("_batch_transfer", "transfer_batch_to_device")):
                out.pop()
        out.append(event)
    return out


def rates_once(rows: list[Row]) -> list[Row]:
    """Leave out learning rates that are logged a second time for the same step."""
    return [row for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] or not _rates(row)]


def whole_epochs(rows: list[Row]) -> list[Row]:
    """Give the epoch a resumed run completes the values it has where it was not interrupted."""
    out: list[Row] = []
    for step, values in rows:
        before = [row[1] for row in out if row[0] == step and values.keys() < row[1].keys()]
        out.append([step, before[0]] if before and "epoch" in values else [step, values])
    return out


@dataclass(frozen=True)
class Difference:
    """What hasten does in another way, why, and how Lightning's record reads then."""

    reason: str
    events: Callable[[list[Event]], list[Event]] = list
    rows: Callable[[list[Row]], list[Row]] = list


DIFFERENCES = (
    Difference(
        "checkpoints are saved after the module's hook, so that what they monitor has its new value",
        events=checkpoints_last,
    ),
    Difference(
        "a callback sees a checkpoint before anything is restored from it, and so may change any of it",
        events=callbacks_before_restoring,
    ),
    Difference(
        "the summary shows example_input_array to the model as it is: hooks meant for batches may not take it",
        events=example_left_alone,
    ),
    Difference(
        "LearningRateMonitor logs once an optimizer step, not once for each batch of an accumulation", rows=rates_once
    ),
    Difference(
        "a run resumed from a checkpoint of the last validation goes on with what the epoch had logged by then",
        rows=whole_epochs,
    ),
)


# -- running the programs


def run(side: str, commands: list[tuple[str, ...]], *, hooks: bool = True) -> tuple[Path, list[dict[str, Any]]]:
    """Run programs under "lightning" or "hasten"; return their folder and what each of them recorded."""
    folder = Path(tempfile.mkdtemp(prefix=f"peer-{side}-"))
    _folders.append(folder)
    start = [PEER] if side == "lightning" else HASTEN
    environment = {**os.environ, "PYTHONPATH": "" if side == "lightning" else str(SOURCE)}
    environment |= {"OMP_NUM_THREADS": "1", "PEER_RECORD_HOOKS": str(int(hooks))}
    kept = []
    for i, (program, *arguments) in enumerate(commands):
        output = folder / f"record-{i}.json"
        done = subprocess.run(
            [*start, str(HERE / "programs" / program), *arguments],
            cwd=folder,
            env={**environment, "PEER_RECORD": str(output)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{side}: {program} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        kept.append(json.loads(output.read_text()))
    return folder, kept


@functools.cache
def records(program: str, side: str, *, hooks: bool = True) -> tuple[Path, list[dict[str, Any]]]:
    """Run one of the programs, once."""
    return run(side, PROGRAMS[program], hooks=hooks)


_folders: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _folders_removed() -> Iterator[None]:
    yield
    for folder in _folders:
        shutil.rmtree(folder)


def pairs(program: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what Lightning and hasten recorded, command by command."""
    with ThreadPoolExecutor() as both:
        found = list(both.map(lambda side: records(program, side)[1], ("lightning", "hasten")))
    return list(zip(*found, strict=True))


def as_hasten(what: Literal["events", "rows"], found: list[Any], without: Difference | None = None) -> list[Any]:
    """Return what Lightning recorded with every difference on purpose but one applied."""
    for difference in DIFFERENCES:
        if difference is not without:
            found = getattr(difference, what)(found)
    return found


def _rates(row: Row) -> bool:
    return all(name.startswith("lr") for name in row[1])


def assert_close(one: Any, other: Any, where: str = "") -> None:
    """Compare nested values; numbers to one part in a million."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert sorted(one) == sorted(other), where
        for key in one:
            assert_close(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for i, (mine, its) in enumerate(zip(one, other, strict=True)):
            assert_close(mine, its, f"{where}[{i}]")
    elif isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        assert both_nan or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6), f"{where}: {one} != {other}"
    else:
        assert one == other, where


each_program = pytest.mark.parametrize("program", PROGRAMS)


# -- what is the same


@each_program
def test_same_hooks_in_the_same_order_at_the_same_epoch_and_step(program: str) -> None:
    for lightning, hasten in pairs(program):
        assert hasten["events"] == as_hasten("events", lightning["events"])


@each_program
def test_same_values_are_logged_at_the_same_steps(program: str) -> None:
    for lightning, hasten in pairs(program):
        assert_close(hasten["logged"], as_hasten("rows", lightning["logged"]))
        assert hasten["hparams"] == lightning["hparams"]
        assert hasten["finalized"] == lightning["finalized"]


@each_program
def test_same_results_weights_and_checkpoints(program: str) -> None:
    """Losses, metrics, counters, predictions, names of checkpoints; weights by a hash of their bytes."""
    for lightning, hasten in pairs(program):
        assert_close(hasten["notes"], lightning["notes"])


@each_program
def test_same_without_anything_overridden(program: str) -> None:
    """The paths a run takes when no hook listens lead to the same numbers."""
    for lightning, hasten in zip(
        records(program, "lightning")[1], records(program, "hasten", hooks=False)[1], strict=True
    ):
        assert hasten["events"] == []
        assert_close(hasten["logged"], as_hasten("rows", lightning["logged"]))
        assert_close(hasten["notes"], lightning["notes"])


def test_resumed_run_goes_on_as_lightning_does_without_a_break() -> None:
    """Shuffling, noise and dropout included; Lightning's own resumed run draws other random numbers."""
    unbroken = run("lightning", UNBROKEN)[1][0]
    resumed = run("hasten", RESUMED)[1][1]
    later = [row for row in unbroken["logged"] if row[0] >= resumed["logged"][0][0]]
    assert len(later) >= 10
    assert_close(resumed["logged"], later)
    assert_close(resumed["notes"]["fit"], unbroken["notes"]["fit"])
    assert_close(resumed["notes"]["best"], unbroken["notes"]["best"])


@each_program
def test_same_files_are_left_behind_beside_the_record_of_the_run(program: str) -> None:
    def files(side: str) -> set[str]:
        folder, _ = records(program, side)
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return {name for name in names if "tfevents" not in name}

    records_of_runs = {name for name in files("hasten") if name.endswith("/run.jsonl")}
    assert records_of_runs
    assert files("hasten") - records_of_runs == files("lightning")


@each_program
def test_same_scalars_and_images_in_tensorboard(program: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(side: str) -> dict[str, Any]:
        folder, _ = records(program, side)
        found: dict[str, Any] = {}
        for path in sorted(folder.rglob("*tfevents*")):
            events = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0}).Reload()
            for tag in events.Tags()["scalars"]:
                for event in events.Scalars(tag):
                    if not math.isnan(event.value):
                        found[f"{tag} at {event.step}"] = event.value
            for tag in events.Tags()["images"]:
                found |= {f"{tag} at {event.step}": "image" for event in events.Images(tag)}
        return found

    assert_close(read("hasten"), read("lightning"))


def test_each_difference_on_purpose_is_one() -> None:
    """The table names nothing that is the same by now."""
    for difference in DIFFERENCES:
        needed = False
        for program in PROGRAMS:
            for lightning, _ in pairs(program):
                events, rows = lightning["events"], lightning["logged"]
                needed |= as_hasten("events", events) != as_hasten("events", events, without=difference)
                needed |= str(as_hasten("rows", rows)) != str(as_hasten("rows", rows, without=difference))
        assert needed, difference.reason
