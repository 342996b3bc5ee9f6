"""Run a program and its ejected form in this process, and compare the weights that each fit ends with."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hasten as L
from hasten_tools.commands.eject import eject_program

Weights = dict[str, Tensor]
BEGIN, END = "# -- the training loop of ", "# -- the program"


def fits(
    text: str, arguments: Sequence[str] = (), *, plain: bool, state: dict[str, Any] | None = None
) -> list[Weights]:
    """Return the weights after each fit of a program, which runs as ``__main__``."""
    found: list[Weights] = []
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__="program.py", **(state or {}))
    module.__dict__["watch"] = lambda kind: _watch(kind, found)
    if plain:
        text = text.replace(END, "watch(Trainer)  # -- the program", 1)
    before = sys.modules["__main__"], sys.argv[:]
    sys.modules["__main__"], sys.argv[:] = module, ["program.py", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()), _watched(found, plain):
            exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
    finally:
        sys.modules["__main__"], sys.argv[:] = before
    return found


@contextlib.contextmanager
def _watched(found: list[Weights], plain: bool) -> Iterator[None]:
    fit = L.Trainer.fit
    if not plain:
        _watch(L.Trainer, found)
    try:
        yield
    finally:
        setattr(L.Trainer, "fit", fit)  # noqa: B010


def _watch(kind: Any, found: list[Weights]) -> None:
    fit = kind.fit

    def watched(trainer: Any, model: nn.Module, *args: Any, **named: Any) -> None:
        fit(trainer, model, *args, **named)
        found.append({name: value.clone() for name, value in model.state_dict().items()})

    kind.fit = watched


def eject(text: str, path: Path, arguments: Sequence[str] = ()) -> str:
    """Return the ejected program for a text, which is written to a file first."""
    path.write_text(text, encoding="utf-8")
    return eject_program(path, text, arguments)


def check_form(plain: str, lines: int = 200) -> None:
    """Check what holds for every ejected program, whose generated part has less than so many lines."""
    compile(plain, "plain.py", "exec")
    assert not re.search(r"^\s*(import|from) (hasten|lightning|pytorch_lightning)", plain, re.MULTILINE)
    assert plain.split(BEGIN, 1)[1].split(END)[0].count("\n") < lines
    too_long = [line for line in plain.split(BEGIN, 1)[1].split(END)[0].splitlines() if len(line) > 100]
    assert too_long == []


def same(first: list[Weights], second: list[Weights]) -> bool:
    """Return whether the weights of all fits are equal bit for bit."""
    return (
        bool(first)
        and [list(one) for one in first] == [list(one) for one in second]
        and all(torch.equal(one[name], two[name]) for one, two in zip(first, second, strict=True) for name in one)
    )
