"""Readers of files that a run, another program or a person has written: CSV, YAML, records and histories."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from hasten.loggers import CSVLogger
from hasten.record.history import History
from hasten_lightning.utilities.saving import load_hparams_from_tags_csv, load_hparams_from_yaml
from hasten_tools.report.read import read_run
from tests.fuzz.arguments import shortened, where
from tests.fuzz.running import Found
from tests.fuzz.values import changed_bytes, plain
from tests.models import Classifier

# -- CSV

_CELLS = (
    "0",
    "1",
    "9",
    "0.5",
    "-1",
    "nan",
    "inf",
    "",
    "1e400",
    "9" * 30,
    "x",
    '"a,b"',
    '"a\nb"',
    "é",
    "0x1",
    "1_0",
    "²",
)
_COLUMNS = ("step", "epoch", "loss", "val", "", "step", "time", "Step", "日本")


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Return the bytes of a metrics.csv, nearly right."""
    names = draw(st.lists(st.sampled_from(_COLUMNS), max_size=4))
    rows = draw(st.lists(st.lists(st.sampled_from(_CELLS), max_size=5), max_size=4))
    ending = draw(st.sampled_from(("\n", "\r\n", "\r", "")))
    text = ending.join(",".join(row) for row in [names, *rows]) + draw(st.sampled_from(("\n", "")))
    return draw(changed_bytes(st.just(text.encode())))


def check_table(data: bytes) -> None:
    """Raise ``Found`` unless a metrics.csv is read, and a logger goes on with it or names it."""
    path = Path("metrics.csv")
    path.write_bytes(data)
    _read(path, data)
    logger = CSVLogger(".", name="", version="")
    try:
        logger.log_metrics({"loss": 0.5, "new": 1.0}, step=7)
        logger.save()
    except (ValueError, OSError) as error:
        if "metrics.csv" not in str(error):
            raise Found(f"CSVLogger: the file is not named: {where(error)}", f"{data!r}\n  {error!r}") from error
        return
    except Exception as error:
        raise Found(f"CSVLogger: {where(error)}", f"{data!r}\n  {error!r}") from error
    with path.open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    if (last.get("loss"), last.get("new")) != ("0.5", "1.0"):
        raise Found("CSVLogger: a row is not what was logged", f"{data!r}\n  {last}")


def _read(path: Path, data: object) -> None:
    """Read a run as plots and reports do."""
    try:
        run = read_run(path)
        series = [run.series(key) for key in run.keys()]  # noqa: SIM118 - not a dict
        values = [value for _, column in series for value in column]
        places = [place for place, _ in series]
        columns = [column for name in run.rows.names() if (column := run.rows.column(name)) is not None]
        times = [run.elapsed(time) for column in columns for time in column.times.tolist() if not math.isnan(time)]
        state = run.state
    except Exception as error:
        raise Found(f"read_run: {where(error)}", f"{shortened(data)}\n  {error!r}") from error
    numbers = [*values, *(one for place in places for one in place), *times]
    if not all(isinstance(one, float) for one in numbers) or not isinstance(state, str):
        raise Found("read_run: a value is no number", shortened(data))
    if any(math.isnan(one) for one in times):
        raise Found("read_run: a time is no number", shortened(data))


# -- YAML and hyper-parameters

_LINES = (
    *(
        "width: 3",
        "lr: 0.1",
        "a: [1, 2]",
        "b: {c: d}",
        "- 1",
        "? x",
        "a: &x 1",
        "b: *x",
        "<<: *x",
        "---",
    ),
    *("...", "a: !!python/object/apply:os.mkdir [ran]", "!!python/name:os.system", "a: !!binary '!'", "a: 2026-99-99"),
    *("a: 2026-01-01", "a: !!int x", "a: !!timestamp x", "a:", "  b: 1", "\tb: 1", "'", '"', "a: |", "# x", "%TAG ! x"),
    *(
        "{",
        "[",
        "width: [",
        "1: 2",
        "null: 1",
        "[1]: 2",
        "{a: 1}: 2",
        "a: .nan",
        "a: ~",
        "= : 1",
        "a: 0o9",
        "a: 1:60:60",
    ),
)
documents = st.tuples(
    st.sampled_from(("hparams.yaml", "hparams.yml", "hparams.csv", "tags.csv", "hparams.txt")),
    st.lists(st.sampled_from(_LINES), max_size=4)
    .map(lambda lines: "\n".join(lines).encode())
    .flatmap(lambda text: changed_bytes(st.just(text))),
)


def check_document(case: tuple[str, bytes]) -> None:
    """Raise ``Found`` unless hyper-parameters are read without running code, or the error names the file."""
    name, data = case
    Path(name).write_bytes(data)
    shown = f"{name}: {data!r}"
    readers: list[Any] = [lambda: Classifier.load_from_checkpoint(_weights(), hparams_file=name)]
    readers.append(
        (lambda: load_hparams_from_tags_csv(name)) if name == "tags.csv" else lambda: load_hparams_from_yaml(name)
    )
    for read in readers:
        try:
            read()
        except (ValueError, TypeError, RuntimeError) as error:
            # Hyper-parameters that the model does not take, or the weights do not fit.
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if not any(word in text for word in (name, "Classifier", "Linear", "dropout", "weights.ckpt")):
                raise Found(f"hparams: the file is not named: {where(error)}", f"{shown}\n  {error!r}") from error
        except Exception as error:
            raise Found(f"hparams: {where(error)}", f"{shown}\n  {error!r}") from error
        if Path("ran").exists():
            raise Found("hparams: code was run", shown)


def _weights() -> Path:
    path = Path("weights.ckpt")
    if not path.exists():
        torch.save({"state_dict": Classifier().state_dict()}, path)
    return path


_names = st.one_of(st.text(max_size=5), st.integers(), st.none(), st.booleans(), st.floats())
hyper_parameters = st.dictionaries(
    st.text(max_size=5), st.one_of(plain, _names, st.lists(_names, max_size=3)), max_size=4
)


def check_hyper_parameters(params: dict[str, Any]) -> None:
    """Raise ``Found`` unless the file of logged hyper-parameters can be read again, as plain data."""
    try:
        logger = CSVLogger(".", name="", version="h")
        logger.log_hyperparams(params)
        logger.save()
        found = yaml.safe_load(Path("h/hparams.yaml").read_bytes())
    except Exception as error:
        raise Found(f"log_hyperparams: {where(error)}", f"{shortened(params)}\n  {error!r}") from error
    if found.keys() != params.keys():
        raise Found("log_hyperparams: other names", f"{shortened(params)}\n  {shortened(found)}")


# -- records

_KINDS = (
    "start",
    "row",
    "speed",
    "step_time",
    "validation",
    "checkpoint",
    "warning",
    "ranks",
    "advice",
    "end",
    "new",
    1,
)
_VALUES = st.one_of(
    st.sampled_from(
        (0, 1, -1, 9, 10**30, 0.5, "1", "", "nan", "-inf", "x", None, True, [], {}, [1], {"a": 1}, {"a": None})
    ),
    st.sampled_from((float("nan"), float("inf"), -float("inf"), 1e308, {"loss": "nan"}, {"": 1}, {"lr": {"SGD": "x"}})),
    st.floats(),
)
_FIELDS = (
    *("step", "epoch", "time", "values", "seconds", "steps", "samples", "tokens", "lr", "data_seconds", "flops"),
    *(
        "peak_flops",
        "memory_bytes",
        "reason",
        "resumed_from",
        "cwd",
        "path",
        "compute_seconds",
        "spent",
        "parts",
        "kind",
    ),
)


@st.composite
def _record_lines(draw: st.DrawFn) -> bytes:
    line: dict[str, Any] = {"kind": draw(st.sampled_from(_KINDS)), "time": 1.0, "step": 9, "epoch": 0}
    if line["kind"] == "row":
        line["values"] = {"loss": 0.5}
    line |= draw(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=3))
    for name in draw(st.lists(st.sampled_from(("time", "step", "epoch", "kind", "values")), max_size=1)):
        line.pop(name, None)
    return json.dumps(line).encode()


records = st.lists(_record_lines(), max_size=6).flatmap(lambda lines: changed_bytes(st.just(b"\n".join(lines) + b"\n")))


def check_record(data: bytes) -> None:
    """Raise ``Found`` unless a run.jsonl is read."""
    Path("run.jsonl").write_bytes(data)
    _read(Path("run.jsonl"), data)


# -- histories

_rows = st.lists(
    st.tuples(
        st.integers(-2, 10),
        st.integers(0, 3),
        st.dictionaries(st.sampled_from(("loss", "", "step", "日本")), st.floats(), min_size=1, max_size=3),
    ),
    max_size=5,
)
histories = st.tuples(
    _rows,
    st.lists(st.tuples(st.sampled_from(("names", "small", "lengths", "ints", "doubles", "floats")), plain), max_size=2),
)


def check_history(case: tuple[list[Any], list[tuple[str, Any]]]) -> None:
    """Raise ``Found`` unless a history comes back whole, and a state that makes no sense is refused as such."""
    rows, changes = case
    history = History()
    for step, epoch, values in rows:
        history.add(step=step, epoch=epoch, values=values, time=1.0)
    state = history.state_dict()
    again = History()
    again.load_state_dict(state)
    if repr(list(again)) != repr(list(history)):
        raise Found("history: rows differ after they were saved", f"{shortened(rows)}")
    if not changes:
        return
    state |= dict(changes)
    try:
        again.load_state_dict(state)
        list(again), repr(again), again.mark(), [again[name] for name in again.keys()]  # noqa: SIM118 - not a dict
    except ValueError as error:
        if "history" not in str(error):
            raise Found(f"history: nothing is named: {where(error)}", f"{shortened(state)}\n  {error!r}") from error
    except Exception as error:
        raise Found(f"history: {where(error)}", f"{shortened(state)}\n  {error!r}") from error
