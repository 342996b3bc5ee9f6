"""What a report says of one run, as text: headline figures, where the time goes, attempts, checkpoints, warnings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hasten.machine.host import bytes_text
from hasten.record.pace import seconds_text
from hasten_tools.report import goodput
from hasten_tools.report.ranks import rank_rows, rank_sentence
from hasten_tools.report.read import RecordedRun, as_number
from hasten_tools.speed.trial_processes import speed_text

# A part of a step that takes this share is worth a line.
_MUCH = 0.15
# Ranks that a page lists.
_MOST_RANKS = 8
_PARTS = {
    "data": "Waiting for data", "transfer": "Transfer to the device", "forward": "Forward", "backward": "Backward",
    "optimizer": "Optimizer", "callbacks": "Callbacks", "logging": "Logging", "checkpoints": "Checkpoints",
    "other": "Other",
}  # fmt: skip
_STATES = {
    "completed": ("good", "Completed"),
    "stopped early": ("good", "Stopped early"),
    "interrupted": ("warn", "Interrupted"),
    "failed": ("bad", "Failed"),
    "running": ("live", "Running"),
    "cut off": ("bad", "Cut off"),
    "unknown": ("mute", "State unknown"),
}


# Label, figure, remark.
_Tile = tuple[str, str, str]


@dataclass
class Hint:
    """A sentence, and the line to write next if there is one."""

    text: str
    line: str = ""


@dataclass
class RunView:
    """One run as the template shows it."""

    name: str
    place: int
    run: RecordedRun
    state: str = ""
    state_look: str = ""
    why: str = ""
    subtitle: str = ""
    tiles: list[_Tile] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    parts_note: str = ""
    spent: list[dict[str, Any]] = field(default_factory=list)
    spent_note: str = ""
    ranks: list[dict[str, str]] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    setup: dict[str, dict[str, str]] = field(default_factory=dict)
    command: str = ""
    advice: dict[str, Any] | None = None


def view(run: RecordedRun, name: str, place: int) -> RunView:
    """Return what the page says of a run."""
    shown = RunView(name, place, run)
    shown.state_look, shown.state = _STATES.get(run.state, ("mute", run.state))
    shown.why = _why(run)
    shown.subtitle = _subtitle(run)
    shown.tiles = [*_progress_tiles(run), *_throughput_tiles(_totals(run.speed)), *_size_tiles(run)]
    shown.parts, shown.parts_note = _parts(run)
    shown.hints = _hints(run, shown.parts)
    shown.spent, shown.spent_note = _spent(run)
    shown.ranks = _ranks(run)
    shown.checkpoints = _checkpoints(run)
    shown.warnings = _warnings(run)
    shown.attempts = _attempts(run)
    shown.setup, shown.command = setup(run)
    shown.advice = _advice(run)
    return shown


# -- numbers


def count_text(number: float) -> str:
    """Return a number for people.

    Example::

        >>> count_text(1880), count_text(0.38271), count_text(1234567)
        ('1,880', '0.3827', '1,234,567')

    """
    if not math.isfinite(number):
        return str(number)
    if number == int(number) or abs(number) >= 10_000:
        return f"{round(number):,}"
    return f"{number:.4g}"


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M")


# -- header


def _why(run: RecordedRun) -> str:
    end = run.end
    if end is not None:
        return str(end.get("message") or "")
    if run.state == "cut off":
        when = f" on {_day(run.last_time)}" if run.last_time else ""
        return (
            f"The record ends{when} without the line that a fit writes at its end: the process was killed, ran out of "
            'memory, or its machine stopped. fit(..., ckpt_path="last") continues from the last checkpoint.'
        )
    return ""


def _subtitle(run: RecordedRun) -> str:
    words = []
    if run.starts:
        start = run.starts[-1]
        if (model := _fact(start, "model", "name")) is not None:
            words.append(str(model))
        words.append(_day(float(run.starts[0]["time"])))
        if (where := _fact(start, "machine", "host")) is not None:
            words.append(str(where))
    words.append(str(run.folder))
    return " · ".join(words)


def _fact(line: Mapping[str, Any], *path: str) -> Any:
    found: Any = line
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _last_step(run: RecordedRun) -> tuple[int | None, int | None]:
    """Return the number of steps and epochs done."""
    if run.end is not None and run.end.get("step") is not None:
        return int(run.end["step"]), run.end.get("epoch")
    if run.rows:
        step, epoch = run.rows.last()
        return step + 1, epoch
    return None, None


def _progress_tiles(run: RecordedRun) -> Iterator[_Tile]:
    best = _best(run)
    if best is not None:
        name, value, step = best
        yield f"Best {name}", count_text(value), f"after {step:,} steps"
    steps, epochs = _last_step(run)
    if steps is not None:
        yield "Steps", f"{steps:,}", "" if epochs is None else f"{epochs:,} epoch{'s' * (epochs != 1)}"
    if run.starts and run.last_time:
        pauses = f"in {len(run.starts)} attempts, without pauses" if len(run.starts) > 1 else ""
        yield "Time", seconds_text(run.elapsed(run.last_time)), pauses
    if (share := run.spent.goodput()) is not None:
        yield "Goodput", f"{share:.0%}", "of all time: steps that count"


def _throughput_tiles(total: Mapping[str, float]) -> Iterator[_Tile]:
    seconds = total.get("seconds")
    if not seconds:
        return
    if total.get("samples"):
        yield "Samples/s", _rate(total["samples"] / seconds), "while steps run"
    if total.get("tokens"):
        yield "Tokens/s", _rate(total["tokens"] / seconds), "with padding"
    if total.get("useful_tokens") and total.get("tokens"):
        yield "Useful tokens", f"{total['useful_tokens'] / total['tokens']:.0%}", "the rest is padding"
    if total.get("mfu") is not None:
        yield "MFU", f"{total['mfu']:.1%}", "of the device's peak"
    if total.get("data_seconds") is not None:
        yield "Waiting for data", f"{total['data_seconds'] / seconds:.0%}", "of all steps together"


def _size_tiles(run: RecordedRun) -> Iterator[_Tile]:
    memory = max((line["memory_bytes"] for line in run.speed if line.get("memory_bytes")), default=None)
    if memory:
        yield "Device memory", bytes_text(memory), "peak"
    if run.starts and (parameters := _fact(run.starts[-1], "model", "parameters")) is not None:
        trainable = _fact(run.starts[-1], "model", "trainable")
        remark = "" if trainable in (None, parameters) else f"{_rate(trainable)} trained"
        yield "Parameters", _rate(parameters), remark


def _rate(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = {}
    flops = available = 0.0
    for line in lines:
        for name in ("seconds", "samples", "tokens", "useful_tokens", "data_seconds"):
            if isinstance(line.get(name), int | float):
                total[name] = total.get(name, 0.0) + line[name]
        if line.get("flops") and line.get("peak_flops") and line.get("seconds"):
            flops += line["flops"]
            available += line["peak_flops"] * line["seconds"]
    if available:
        total["mfu"] = flops / available
    return total


def _best(run: RecordedRun) -> tuple[str, float, int] | None:
    """Return name, value and number of steps of the best checkpoint's monitored value."""
    best = None
    for line in run.checkpoints:
        if line.get("best") and isinstance(line.get("monitor"), Mapping):
            for name, value in line["monitor"].items():
                if (number := as_number(value)) is not None and math.isfinite(number):
                    best = str(name), number, _steps_done(line)
    return best


def _steps_done(line: Mapping[str, Any]) -> int:
    # Lines count steps from 0, and names of checkpoints say how many are done.
    return int(line.get("step") or 0) + 1


# -- where the time goes


def _parts(run: RecordedRun) -> tuple[list[dict[str, Any]], str]:
    sums: dict[str, float] = {}
    count = 0
    for line in run.step_times:
        if isinstance(line.get("parts"), Mapping):
            count += 1
            for name, seconds in line["parts"].items():
                if isinstance(seconds, int | float):
                    sums[str(name)] = sums.get(str(name), 0.0) + seconds
    total = sum(sums.values())
    if not total:
        return [], ""
    order = [*_PARTS, *sums]
    parts = [
        {"key": name, "title": _PARTS.get(name, name), "share": sums[name] / total,
         "seconds": seconds_text(sums[name] / count)}
        for name in dict.fromkeys(order) if sums.get(name, 0.0) > 0
    ]  # fmt: skip
    note = f"Mean of {count:,} timed step{'s' * (count != 1)}: {seconds_text(total / count)} each."
    shares = _beside_steps(run)
    return parts, f"{note} {shares}".strip()


def _beside_steps(run: RecordedRun) -> str:
    """Return a sentence about what a fit does besides steps."""
    if not run.starts or not run.last_time:
        return ""
    whole = run.elapsed(run.last_time)
    words = []
    for what, lines in (("validation", run.validations), ("saving checkpoints", run.checkpoints)):
        seconds = sum(line["seconds"] for line in lines if isinstance(line.get("seconds"), int | float))
        if whole > 0 and seconds / whole >= 0.005:
            words.append(f"{what} {seconds / whole:.0%}")
    return f"Of the whole fit, {' and '.join(words)}." if words else ""


# -- over all attempts


def _spent(run: RecordedRun) -> tuple[list[dict[str, Any]], str]:
    """Return the parts of the time of all attempts, and a sentence about them; empty where they are not known."""
    share, found = run.spent.goodput(), run.spent.seconds()
    if share is None:
        return [], ""
    total, attempts = sum(found.values()), len(run.spent.attempts)
    parts = [
        {"key": f"time-{part}", "title": goodput.PARTS[part], "share": seconds / total,
         "seconds": seconds_text(seconds)}
        for part, seconds in found.items()
    ]  # fmt: skip
    return parts, f"{seconds_text(total)} in {attempts:,} attempt{'s' * (attempts != 1)}; {share:.0%} of it is goodput."


def _ranks(run: RecordedRun) -> list[dict[str, str]]:
    """Return a row of texts for each rank that was among the slowest."""
    return [
        {"rank": f"Rank {row.rank}", "slowest": f"{row.slowest:,}", "step": seconds_text(row.own_seconds),
         "data": f"{row.data_share:.0%}", "waiting": seconds_text(row.waiting_seconds)}
        for row in rank_rows(run.ranks)[:_MOST_RANKS]
    ]  # fmt: skip


@dataclass
class _TimeUse:
    """What the hints look at."""

    # The line of the last start, and the arguments of its Trainer.
    start: Mapping[str, Any]
    arguments: Mapping[str, Any]
    # Of a step, by part.
    share: dict[str, float]
    # Sums over all steps, such as "tokens".
    totals: dict[str, float]

    @classmethod
    def of(cls, run: RecordedRun, parts: Sequence[Mapping[str, Any]]) -> _TimeUse:
        start = run.starts[-1] if run.starts else {}
        arguments = start.get("arguments")
        totals = _totals(run.speed)
        share = {part["key"]: part["share"] for part in parts}
        if totals.get("seconds") and totals.get("data_seconds") is not None:
            # Of all steps, and not only of those that were timed.
            share["data"] = max(share.get("data", 0.0), totals["data_seconds"] / totals["seconds"])
        return cls(start, arguments if isinstance(arguments, Mapping) else {}, share, totals)

    def takes(self, part: str, at_least: float = _MUCH) -> bool:
        return self.share.get(part, 0.0) >= at_least


def _hints(run: RecordedRun, parts: Sequence[Mapping[str, Any]]) -> list[Hint]:
    """Return what dominates, and the lines to write next."""
    use = _TimeUse.of(run, parts)
    sentence = rank_sentence(run.ranks)
    hints = [*([Hint(sentence)] if sentence else []), *_data_hint(use), *_part_hints(use), *_padding_hint(use)]
    if hints:
        return hints
    compute = use.share.get("forward", 0.0) + use.share.get("backward", 0.0)
    if compute >= 0.5:
        text = f"Forward and backward take {compute:.0%} of a step: the time goes into the model, as it should."
        return [Hint(text, _faster_compute(use))]
    if use.share:
        first = max(use.share, key=lambda name: use.share[name])
        text = f"{_PARTS.get(first, first)}: {use.share[first]:.0%} of a step, the largest part. Nothing stands out."
        return [Hint(text, _advise(use))]
    return []


def _data_hint(use: _TimeUse) -> Iterator[Hint]:
    if use.takes("data"):
        text = f"Waiting for data takes {use.share['data']:.0%} of the time"
        if "num_workers" not in use.arguments:
            yield Hint(f"{text}.", 'Trainer(num_workers="auto")')
        elif "resident" not in use.arguments:
            yield Hint(f"{text}.", "Trainer(resident=True)")
        else:
            yield Hint(f"{text}: the dataset's own work per sample is what to make cheaper.")


def _part_hints(use: _TimeUse) -> Iterator[Hint]:
    """Yield a hint for each other part of a step that takes much, unless the argument against it is given."""
    every = use.arguments.get("log_every_n_steps")
    logs_often = isinstance(every, int) and every < 50
    rules = (
        ("transfer", _MUCH, "resident", "Copying batches to the device takes {:.0%} of a step.",
         'Trainer(resident="device")  # if the data fits, else DataLoader(pin_memory=True)'),
        ("optimizer", 0.25, "fused_optimizer", "The optimizer takes {:.0%} of a step.",
         "Trainer(fused_optimizer=True)"),
        ("callbacks", _MUCH, "", "Callbacks take {:.0%} of a step. Hooks that run at every step are the place to look.",
         ""),
        ("logging", _MUCH, "", "Logging takes {:.0%} of a step.",
         "Trainer(log_every_n_steps=50)  # or more" if logs_often else ""),
        ("checkpoints", _MUCH, "", "Saving checkpoints takes {:.0%} of a step.",
         "ModelCheckpoint(every_n_train_steps=...)  # save less often"),
    )  # fmt: skip
    for part, at_least, argument, text, line in rules:
        if use.takes(part, at_least) and argument not in use.arguments:
            yield Hint(text.format(use.share[part]), line)


def _padding_hint(use: _TimeUse) -> Iterator[Hint]:
    useful, tokens = use.totals.get("useful_tokens"), use.totals.get("tokens")
    if useful and tokens and useful / tokens < 0.85 and not {"batching", "packed"} & set(use.arguments):
        yield Hint(f"{1 - useful / tokens:.0%} of the tokens are padding.", "Trainer(packed=True)")


def _faster_compute(use: _TimeUse) -> str:
    """Return the line that may make forward and backward faster, or ""."""
    on_gpu = _fact(use.start, "machine", "accelerator") == "cuda"
    if on_gpu and "precision" not in use.arguments:
        return 'Trainer(precision="bf16-mixed")'
    if on_gpu and "compile" not in use.arguments:
        return "Trainer(compile=True)"
    return _advise(use) if "speed" not in use.arguments else ""


def _advise(use: _TimeUse) -> str:
    program = use.start.get("program")
    name = shlex.quote(Path(str(program)).name) if program else "program.py"
    return f"hasten advise {name}  # measures what would be faster"


# -- lists


def _counted(epoch: object) -> object:
    """Return an epoch as people count them: from 1."""
    return epoch + 1 if isinstance(epoch, int) else epoch


def _checkpoints(run: RecordedRun) -> list[dict[str, Any]]:
    lines = {str(line.get("path")): line for line in run.checkpoints}
    best = max((place for place, line in enumerate(lines.values()) if line.get("best")), default=None)
    shown = []
    for place, (path, line) in enumerate(lines.items()):
        monitor = line.get("monitor") if isinstance(line.get("monitor"), Mapping) else {}
        assert monitor is not None
        metrics = ", ".join(
            f"{name} {count_text(number) if (number := as_number(value)) is not None else value}"
            for name, value in monitor.items()
        )
        size = line.get("bytes")
        if size is None and run.folder.is_dir() and Path(path).is_file():
            # It was still being written when it was noted.
            size = Path(path).stat().st_size
        shown.append(
            {
                "name": Path(path).name, "path": path, "step": _steps_done(line), "epoch": _counted(line.get("epoch")),
                "metrics": metrics, "size": bytes_text(size) if isinstance(size, int | float) else "",
                "seconds": seconds_text(line["seconds"]) if isinstance(line.get("seconds"), int | float) else "",
                "best": place == best,
                # Elsewhere, files of another machine cannot be looked for.
                "gone": run.folder.is_dir() and Path(path).parent.is_dir() and not Path(path).exists(),
            }
        )  # fmt: skip
    return shown


def _warnings(run: RecordedRun) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in run.warnings:
        key = str(line.get("category") or "Warning"), str(line.get("message"))
        found.setdefault(key, {"category": key[0], "message": key[1], "count": 0})["count"] += 1
    return sorted(found.values(), key=lambda each: -each["count"])


def _attempts(run: RecordedRun) -> list[dict[str, Any]]:
    shown = []
    for place, start in enumerate(run.starts):
        end = run.ends[place] if place < len(run.ends) else None
        last = run.lasts[place] if place < len(run.lasts) else float(start["time"])
        began = float(start["time"])
        if end is not None:
            how = str(end.get("reason") or "")
        else:
            how = run.state if place + 1 == len(run.starts) else "cut off"
        resumed = start.get("resumed_from")
        shown.append(
            {
                "number": place + 1, "began": _day(began), "duration": seconds_text(max(0.0, last - began)),
                "step": int(start.get("step") or 0),
                "from": Path(str(resumed)).name if resumed else "", "how": how,
                "message": str((end or {}).get("message") or ""), "start_ms": began * 1000, "end_ms": last * 1000,
            }
        )  # fmt: skip
    return shown


def setup(run: RecordedRun) -> tuple[dict[str, dict[str, str]], str]:
    """Return tables of arguments, hyperparameters, versions, machine and git state, and the command."""
    if not run.starts:
        return {}, ""
    start = run.starts[-1]
    tables: dict[str, dict[str, str]] = {}
    for title, key in (("Arguments", "arguments"), ("Hyperparameters", "hparams"), ("Versions", "versions")):
        if isinstance(start.get(key), Mapping) and start[key]:
            tables[title] = {str(name): _value(value) for name, value in start[key].items()}
    machine = start.get("machine")
    if isinstance(machine, Mapping):
        tables["Machine"] = {
            _MACHINE.get(str(name), str(name)): bytes_text(value) if name == "memory_bytes" and value else _value(value)
            for name, value in machine.items()
            if value is not None
        }
    if shapes := _shapes(start.get("model"), start.get("data")):
        tables["Model and data"] = shapes
    if isinstance(git := start.get("git"), Mapping):
        changes = "with uncommitted changes" if git.get("dirty") else "no uncommitted changes"
        tables["Git"] = {
            "commit": _value(git.get("commit")), "branch": _value(git.get("branch") or "(none)"), "state": changes
        }  # fmt: skip
    command = start.get("command")
    return tables, shlex.join(map(str, command)) if isinstance(command, list) else ""


def _shapes(model: object, data: object) -> dict[str, str]:
    shapes: dict[str, str] = {}
    if isinstance(model, Mapping):
        shapes["model"] = _value(model.get("name"))
        for name in ("parameters", "trainable"):
            if isinstance(model.get(name), int):
                shapes[name] = f"{model[name]:,}"
    if isinstance(data, Mapping):
        for name, title in (("train_batches", "batches per epoch"), ("batch_size", "batch size")):
            if data.get(name) is not None:
                shapes[title] = _value(data[name])
    return shapes


_MACHINE = {"memory_bytes": "memory", "world_size": "processes"}


def _value(value: Any) -> str:
    if isinstance(value, list):
        same = len(value) > 1 and len({str(each) for each in value}) == 1
        return f"{len(value)} x {value[0]}" if same else ", ".join(_value(each) for each in value)
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(each)}" for name, each in value.items())
    return str(value)


def _advice(run: RecordedRun) -> dict[str, Any] | None:
    line = run.advice
    if line is None:
        return None
    rows = [row for row in line.get("rows") or () if isinstance(row, Mapping)]
    shown = [
        {
            "name": str(row.get("name", "")),
            "verdict": str(row.get("verdict", "")),
            "factor": speed_text(*(as_number(row.get(name)) for name in ("factor", "low", "high"))),
        }
        for row in rows
    ]
    return {"line": str(line.get("line") or ""), "rows": shown}


def differences(runs: Sequence[RunView]) -> tuple[list[tuple[str, str, list[str]]], list[tuple[str, str, str]]]:
    """Return what differs between runs (table, name, the value of each run), and what all have in common."""
    differing: list[tuple[str, str, list[str]]] = []
    common: list[tuple[str, str, str]] = []
    places = dict.fromkeys((title, name) for run in runs for title, table in run.setup.items() for name in table)
    for title, name in places:
        values = [run.setup.get(title, {}).get(name, "not set" if run.setup else "unknown") for run in runs]
        if len(set(values)) > 1:
            differing.append((title, name, values))
        else:
            common.append((title, name, values[0]))
    return differing, common
