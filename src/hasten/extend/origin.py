"""Where classes, functions and source files come from: hasten's own packages, a library, or the program.

hasten ships several packages in one wheel. Only this module decides whether an object is hasten's, so that code may be
in any of these packages.
"""

from __future__ import annotations

from os import path

# The packages of the wheel.
ROOTS = frozenset({"hasten", "hasten_deepspeed", "hasten_lightning", "hasten_tools", "hasten_xla"})
# The folder that holds them, with a separator at its end.
SOURCE = path.join(path.abspath(__file__).rpartition(path.join("hasten", "extend"))[0], "")
# The folders of their source, each with a separator at its end, for ``str.startswith``.
FOLDERS = tuple(sorted(path.join(SOURCE, root, "") for root in ROOTS))


def module_of(thing: object) -> str:
    """Return the name of the module that defines a class, a function or a method, or ``""``.

    Example::

        >>> import collections
        >>> module_of(collections.OrderedDict)
        'collections'

    """
    return str(getattr(thing, "__module__", None) or "")


def package_of(thing: object) -> str:
    """Return the outermost package that defines a class, a function or a method, or ``""``.

    Example::

        >>> import torch
        >>> package_of(torch.optim.SGD)
        'torch'

    """
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def comes_from(thing: object, *packages: str) -> bool:
    """Return whether a class, a function or a method is defined in one of these packages or modules, or below them.

    Example::

        >>> import torch
        >>> comes_from(torch.nn.Linear, "torch.optim", "torch.nn")
        True

    """
    module = f"{getattr(thing, '__module__', None)}."
    for package in packages:  # noqa: SIM110 - a generator would be a Python call for each package.
        if module.startswith(f"{package}."):
            return True
    return False


def is_builtin(thing: object) -> bool:
    """Return whether a class, a function or a method is part of hasten.

    Example::

        >>> from hasten.callbacks import Timer
        >>> is_builtin(Timer), is_builtin(type("Mine", (Timer,), {"__module__": "train"}))
        (True, False)

    """
    return str(getattr(thing, "__module__", None) or "").partition(".")[0] in ROOTS


def is_builtin_file(file: str) -> bool:
    """Return whether a source file is part of hasten."""
    return file.startswith(FOLDERS)


def full_name(thing: object) -> str:
    """Return the name of a class or a function with its module.

    Example::

        >>> import collections
        >>> full_name(collections.OrderedDict)
        'collections.OrderedDict'

    """
    return f"{module_of(thing)}.{getattr(thing, '__qualname__', '')}"
