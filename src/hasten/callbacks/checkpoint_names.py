"""File names of checkpoints, made from templates such as ``{epoch}-{val_loss:.2f}``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hasten._lib.errors import MisconfigurationException

_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
# Characters that would lead to another folder.
_UNSAFE = re.compile(r"[/\\\x00-\x1f]")


def check_template(template: str, argument: str) -> None:
    """Check before the run that a template stays inside its folder and its fields can be filled.

    Raises:
        TypeError: it is not a string.
        MisconfigurationException: it names another folder, or a field cannot be filled with a number.

    """
    if not isinstance(template, str):
        raise TypeError(f"{argument}={template!r}: use a string, for instance '{{epoch}}-{{val_loss:.2f}}'.")
    parts = template.replace("\\", "/").split("/")
    if os.path.isabs(template) or ".." in parts or "\0" in template:
        raise MisconfigurationException(
            f"{argument}={template!r} leaves the folder of the checkpoints. Give the folder as dirpath=."
        )
    for name, spec in _FIELD.findall(template):
        if not name:
            raise MisconfigurationException(
                f"{argument}={template!r}: a field without a name. Write {{epoch}}."
            )
        if not any(_fits(value, spec) for value in (1, 0.5)):
            raise MisconfigurationException(
                f"{argument}={template!r}: {spec!r} is not a format of a number. Write for instance {{{name}:.2f}}."
            )


def format_name(template: str, metrics: Mapping[str, Any], *, equals: str, insert_names: bool) -> str:
    """Fill a template.

    Args:
        template: text with fields ``{name}`` or ``{name:format}``; a name that was not logged counts as 0.
        metrics: values by name.
        equals: put between a name and its value.
        insert_names: write ``name=value`` instead of ``value``.

    Raises:
        ValueError: a value cannot be written in its format.

    Example::

        >>> format_name("{epoch:02d}-{val_loss:.2f}", {"epoch": 3, "val_loss": 0.517}, equals="=", insert_names=True)
        'epoch=03-val_loss=0.52'

    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        value = metrics.get(name, 0)
        if isinstance(value, Tensor):
            value = value.item()
        try:
            text = _UNSAFE.sub("_", format(value, spec))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"The checkpoint name {template!r} cannot be filled: {name} is {value!r}, which has no format "
                f"{spec!r}. Write {{{name}:.2f}} for a fraction."
            ) from error
        return f"{name}{equals}{text}" if insert_names else text

    return _FIELD.sub(fill, template)


def _fits(value: float, spec: str) -> bool:
    try:
        format(value, spec)
    except ValueError:
        return False
    return True
