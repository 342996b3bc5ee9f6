"""Lightning's signatures: ``signatures.txt`` has the parameters of the classes that stand for hasten's."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import torch

# So that Python evaluates the defaults and leaves the types as they are written.
_SOURCE = "from __future__ import annotations\ndef __init__(self, {parameters}): ..."


@functools.cache
def sections() -> dict[str, dict[str, str]]:
    """Return the sections of the file: the rest of each line by what precedes its colon."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").replace("\n    ", " ")
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            before, _, after = line.partition(": ")
            section[before] = after
    return found


@functools.cache
def _by_word(section: str) -> dict[str, str]:
    return {word: before for before, words in sections()[section].items() for word in words.split()}


class _Names(dict[str, Any]):
    """The names in types and defaults, imported when one is used."""

    def __missing__(self, name: str) -> Any:
        self[name] = getattr(importlib.import_module(_by_word("names")[name]), name)
        return self[name]


@functools.cache
def signature_of(name: str) -> inspect.Signature | None:
    """Return the signature that ``__init__`` of a facade has in Lightning; None where it is that of hasten's class.

    A type with a name that the file does not look up is a text: importing some takes a second.

    Example::

        >>> str(signature_of("hasten_lightning._classes.strategies.Strategy"))[:61]
        '(self, accelerator: hasten.machine.devices.Accelerator | None'

    """
    parameters = sections()["signatures"].get(name.removeprefix("hasten_lightning."))
    if parameters is None:
        return None
    names = _Names(os=os, torch=torch)
    exec(_SOURCE.format(parameters=parameters), {}, names)
    plain = inspect.signature(names["__init__"])

    def typed(parameter: inspect.Parameter) -> inspect.Parameter:
        written = parameter.annotation
        if written is parameter.empty:
            written = _by_word("types")[parameter.name]
        try:
            return parameter.replace(annotation=eval(written, {}, names))
        except NameError:
            return parameter.replace(annotation=written)

    owner, *others = plain.parameters.values()
    return plain.replace(parameters=[owner, *map(typed, others)], return_annotation=None)
