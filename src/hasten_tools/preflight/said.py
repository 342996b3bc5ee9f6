"""Errors and warnings of a run as rows: what happened, in which line of the program, and what to write instead."""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hasten._lib import rank_zero
from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import Parts, notes_of, parts_of
from hasten._lib.explain import remedy_for
from hasten.extend import frames
from hasten.extend.origin import is_builtin, is_builtin_file
from hasten.hooks import HOOK_NAMES
from hasten_tools.preflight.report import CheckRow, Rows

_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))}
    | {os.path.abspath(path) + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))}
)
# Methods of a module or datamodule that give a row its name, besides hooks and steps.
_METHODS = HOOK_NAMES | {
    "configure_optimizers", "configure_callbacks", "optimizer_step", "lr_scheduler_step", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader", "transfer_batch_to_device",
    "configure_gradient_clipping",
}  # fmt: skip
_CALLS = ("fit", "validate", "test", "predict")
# Errors of fit that come from no method of the program, and the row they belong to.
_ROWS_OF_FIT = {
    "val_check_interval": "validation",
    "conditioned on metric": "learning rate",
    "train dataloader": "train data",
    "there is no data": "train data",
}
# What ``annotate`` adds to the errors of steps.
_STEP_NOTE = re.compile(r"in \w+\.(\w+), batch \d+")
# Where the advice is wrong, or does not apply to a check.
_NOISE = ("does not have many workers", "`max_epochs` was not set", "Checkpoint directory")
_MOST_CHARACTERS = 600


def seen_and_fix(parts: Parts) -> tuple[str, str]:
    """Return what is wrong as a sentence, and what to write, each on one line.

    Example::

        >>> seen_and_fix(Parts("Trainer(max_epochs=-3):", "use a whole number of at least 0."))
        ('Trainer(max_epochs=-3).', 'use a whole number of at least 0.')

    """
    seen, fix = " ".join(parts.what.split()), " ".join(parts.fix.split())
    return seen.rstrip(":;") + ("." if seen.endswith((":", ";")) else ""), fix


def is_of_library(file: str) -> bool:
    """Return whether a file belongs to hasten, to an installed package or to Python itself."""
    if file.startswith("<") or is_builtin_file(file):
        return True
    return file.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in file


def place_of(file: str, line: int) -> str:
    """Return a line of a program as "train.py:12", seen from the working directory."""
    try:
        shown = os.path.relpath(file)
    except ValueError:  # Another drive.
        shown = file
    return f"{file if shown.startswith('..') else shown}:{line}"


def _entries_of_program(error: BaseException) -> list[tuple[str, int, str]]:
    trace = traceback.walk_tb(error.__traceback__)
    entries = ((frames.file_of(frame), line, frames.name_of(frame)) for frame, line in trace)
    return [entry for entry in entries if not is_of_library(entry[0])]


def row_of_error(error: BaseException, name: str) -> CheckRow:
    """Return the row of an error that fit would have raised.

    It has this name where the traceback does not lead through a hook or step of the program.
    """
    entries = _entries_of_program(error)
    # A check may be called from a method of the same name; the innermost hook is the one that failed.
    inner = next((each for *_, each in reversed(entries) if each in _METHODS), None)
    noted = [found[1] for note in getattr(error, "__notes__", []) if (found := _STEP_NOTE.match(note))]
    place = ""
    if entries and (inner is not None or noted):
        place = place_of(*entries[-1][:2])
    text = str(error).strip() or type(error).__name__
    kind = "" if is_builtin(type(error)) or text == type(error).__name__ else f"{type(error).__name__}: "
    seen, advice = _with_notes(error, *seen_and_fix(_parts(error, text)))
    advice = advice or remedy_for(text)
    if name in _CALLS:
        name = _name_in(text) or name
    return CheckRow(noted[0] if noted else inner or name, "error", shortened(f"{kind}{seen}"), advice, place)


def _parts(error: BaseException, text: str) -> Parts:
    """Return the parts of an error with this text; of one about memory, which lists numbers, the first sentence."""
    if is_out_of_memory(error):
        return Parts(text.split(". ")[0] + ".")
    return parts_of(error) if str(error).strip() else Parts(text)


def _with_notes(error: BaseException, seen: str, advice: str) -> tuple[str, str]:
    """Return what is wrong and what to do, with what the notes of an error add to them."""
    # The batch has a row of its own.
    notes = [note for note in notes_of(error) if not note.what.startswith("in ")]
    if notes and len(seen) > 120:
        seen = seen.split(". ")[0]
    for note in notes:
        more, fix = seen_and_fix(note)
        if more:
            seen = f"{seen.rstrip('.')}. {more}".strip()
        advice = f"{advice} {fix}".strip()
    return seen, advice


def _name_in(text: str) -> str | None:
    """Return the method that a message of hasten is about, or the row that it belongs to."""
    for found in re.finditer(r"\b[A-Za-z_]\w*\.(\w+)", text):
        if found[1] in _METHODS:
            return found[1]
    return next((row for part, row in _ROWS_OF_FIT.items() if part in text), None)


def innermost(error: BaseException) -> str:
    """Return the last line of the program in a traceback; "" if there is none."""
    entries = _entries_of_program(error)
    return place_of(*entries[-1][:2]) if entries else ""


def shortened(text: str) -> str:
    """Return a text that is not too long for a cell."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 4].rstrip() + " ..."


# Warnings of libraries that are about the program; others say nothing about it.
_OF_LIBRARIES = ("target size", "pin_memory", "optimizer.step()", "lr_scheduler.step()", "was called before", "worker")


def _take_warning(rows: Rows, message: Warning | str) -> None:
    """Make a row of a warning, if it is about the program."""
    text = " ".join(str(message).split())
    source = _who_warns()
    ours = is_builtin_file(source)
    known = is_of_library(source) and any(part in text for part in _OF_LIBRARIES)
    if any(noise in text for noise in _NOISE) or not (ours or known):
        return
    seen, advice = seen_and_fix(parts_of(message))
    rows.warning(_name_of(text), shortened(seen), advice or remedy_for(text))


def _who_warns() -> str:
    """Return the file that called ``warnings.warn``, from within ``warnings.showwarning``."""
    between = ("warnings.py", "_py_warnings.py", os.path.basename(__file__))
    frame = frames.first_outside(frames.caller(2), lambda file: os.path.basename(file) in between)
    return "" if frame is None else frames.file_of(frame)


# By a part of the message.
_NAMES = {
    "looks like the hook": "hooks",
    "in eval mode": "modes",
    "validation_step": "validation data",
    "no validation runs": "validation data",
    "lr_scheduler": "learning rate",
    "scheduler": "learning rate",
    "are not among those of": "optimizer",
    "returned None": "training_step",
    "target size": "loss",
    "log_every_n_steps": "logging",
    "self.log": "logging",
    "logged": "logging",
    "is nan": "loss",
    "is inf": "loss",
    "loader": "data",
}


def _name_of(text: str) -> str:
    return next((name for part, name in _NAMES.items() if part in text), "warning")


@contextmanager
def listening(rows: Rows) -> Iterator[None]:
    """Make rows of the warnings in the block, and keep hasten's own messages quiet; fit gives them again."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        _take_warning(rows, message)

    with rank_zero.messages_later(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield
