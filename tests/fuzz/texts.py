"""Templates of file names, and texts that stand for a time or a number of epochs or steps."""

from __future__ import annotations

import math
import os
import shutil
from datetime import timedelta
from typing import Any

import torch
from hypothesis import strategies as st

from hasten import Trainer
from hasten._lib.errors import parts_of
from hasten.callbacks import ModelCheckpoint, Timer
from tests.fuzz.arguments import shortened, where
from tests.fuzz.running import Found

# -- templates

_PIECES = (
    *(
        "{epoch}",
        "{step}",
        "{val_loss}",
        "{epoch:02d}",
        "{val_loss:.2f}",
        "{val/loss:.3e}",
        "{missing}",
        "{",
        "}",
        "{}",
    ),
    *(
        "{:",
        ":}",
        "{epoch",
        "epoch}",
        "{{epoch}}",
        "{epoch!r}",
        "{epoch:{step}}",
        "{a[0]}",
        "{a.b}",
        "{0}",
        "{epoch:c}",
    ),
    *("{epoch:99999}", "{epoch:999999999999}", "{epoch:.400f}", "{val_loss:%}", "{epoch:b}", "{epoch:_}", "{step:,}"),
    *("{..}", "{epoch:/>4}", "{epoch:\0>4}", "..", "/", "\\", "../", "a/b", "C:", "~", "$HOME", "%s", "\0", "\n", "."),
    *("é", "日", "\ud800", "x" * 100, "-", "=", " ", "last", ".ckpt", "*", "?", "con", "-v1"),
)
templates = st.tuples(
    st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=3)), max_size=5).map("".join),
    st.sampled_from((3, 0, 10**6, 10**12)),
    st.sampled_from((0.25, -1.5, 0.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, True, 7)),
    st.booleans(),
)


def check_template(case: tuple[str, int, float, bool]) -> None:
    """Raise ``Found`` unless the name of a file can be made and stays in its folder, or the template is refused."""
    template, epoch, loss, inserts = case
    shown = f"ModelCheckpoint(filename={shortened(template)}, auto_insert_metric_name={inserts}), {loss=}, {epoch=}"
    folder = os.path.realpath("kept")
    try:
        callback = ModelCheckpoint(dirpath=folder, filename=template, auto_insert_metric_name=inserts)
    except (TypeError, ValueError) as error:
        if parts_of(error).argument != "filename":
            raise Found(f"template: no argument is named: {where(error)}", f"{shown}\n  {error!r}") from error
        return
    except Exception as error:
        raise Found(f"template: {where(error)}", f"{shown}\n  {error!r}") from error
    values = {
        "epoch": epoch,
        "step": torch.tensor(7),
        "val_loss": torch.tensor(loss, dtype=torch.float64),
        "val/loss": loss,
    }
    try:
        path = callback.format_checkpoint_name(values)
    except ValueError as error:
        # A format for whole numbers, which a fraction does not have.
        if "cannot be filled" in str(error):
            return
        raise Found(f"name: {where(error)}", f"{shown}\n  {error!r}") from error
    except Exception as error:
        raise Found(f"name: {where(error)}", f"{shown}\n  {error!r}") from error
    if os.path.commonpath([folder, os.path.normpath(path)]) != folder or os.path.normpath(path) == folder:
        raise Found("name: leaves its folder", f"{shown}\n  {path!r}")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb"):
            pass
        # Another template may name a file where this one has a folder.
        shutil.rmtree(folder)
    except (OSError, ValueError) as error:
        raise Found(f"name: cannot be written: {type(error).__name__}", f"{shown}\n  {path!r}\n  {error!r}") from error


# -- durations

_NUMBERS = (
    "",
    "0",
    "1",
    "00",
    "7",
    "90",
    "1.5",
    "-1",
    "1e3",
    ".5",
    "99999999999999999999",
    "9" * 400,
    "9" * 5000,
    "٣",
    "½",
)
_UNITS = (
    "",
    "s",
    "sec",
    "seconds",
    "m",
    "min",
    "h",
    "d",
    "days",
    "w",
    "ep",
    "epochs",
    "st",
    "steps",
    "y",
    "ms",
    "D",
    "µs",
)
_texts = st.one_of(
    st.tuples(
        st.sampled_from(("", " ", "+")),
        st.sampled_from(_NUMBERS),
        st.sampled_from(("", " ", "\t")),
        st.sampled_from(_UNITS),
    ).map("".join),
    st.lists(st.sampled_from(("00", "12", "1", "99", "999999999", "9" * 20, "-1", "", "١٢", "a")), max_size=5).map(
        ":".join
    ),
    st.text(max_size=8),
)
_parts = st.sampled_from(("days", "seconds", "minutes", "hours", "weeks", "microseconds", "years", "", "Days"))
_amounts = st.one_of(
    st.sampled_from((0, 1, -1, 1.5, 10**9, 10**12, 10**30, 10**400, math.nan, math.inf, True, None, "1", [], 1j)),
    st.floats(),
    st.integers(),
)
durations = st.tuples(
    st.sampled_from(
        ("max_time", "max_epochs", "max_steps", "val_check_interval", "Timer", "every", "interval", "keep")
    ),
    st.one_of(
        _texts,
        st.dictionaries(st.one_of(_parts, st.just(1)), _amounts, max_size=3),
        st.timedeltas(),
        st.sampled_from((timedelta(0), timedelta.max, timedelta.min)),
    ),
)


def check_duration(case: tuple[str, Any]) -> None:
    """Raise ``Found`` unless a time is taken as what it says, or refused with the name of its argument."""
    which, value = case
    make, argument = _TAKES[which]
    shown = f"{which}={shortened(value)}"
    try:
        taken = make(value)
    except (TypeError, ValueError) as error:
        if parts_of(error).argument != argument:
            raise Found(f"duration: no argument is named: {where(error)}", f"{shown}\n  {error!r}") from error
    except Exception as error:
        raise Found(f"duration: {where(error)}", f"{shown}\n  {error!r}") from error
    else:
        if isinstance(taken, timedelta) and taken < timedelta(0):
            raise Found(f"duration: {argument} takes a negative time", shown)


def _trainer(name: str) -> Any:
    return lambda value: Trainer(accelerator="cpu", devices=1, logger=False, **{name: value}) and None


def _of_timer(value: Any) -> timedelta:
    seconds = Timer(value).time_remaining()
    assert seconds is not None
    return timedelta.max if seconds > timedelta.max.total_seconds() else timedelta(seconds=seconds)


_TAKES: dict[str, tuple[Any, str]] = {
    **{name: (_trainer(name), name) for name in ("max_time", "max_epochs", "max_steps", "val_check_interval")},
    "Timer": (_of_timer, "duration"),
    "every": (lambda value: ModelCheckpoint(every_n_epochs=value) and None, "every_n_epochs"),
    "interval": (lambda value: ModelCheckpoint(train_time_interval=value)._train_time_interval, "train_time_interval"),
    "keep": (lambda value: ModelCheckpoint(save_top_k=-1, keep_for=value).keep_for, "keep_for"),
}
