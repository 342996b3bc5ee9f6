"""The command line under Lightning's names: configs name Lightning's classes, and the Trainer has its parameters."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from jsonargparse import _util as jsonargparse_util

from hasten import cli
from hasten._lib.optional import need
from hasten.cli import LightningArgumentParser
from hasten.elsewhere import conventions
from hasten.extend.origin import is_builtin
from hasten_lightning._classes import originals
from hasten_lightning.facades import Facade, exactly
from hasten_lightning.modules import TABLE
from hasten_lightning.names import VERSION

# Whose classes a command line or a config may name.
_PACKAGES = ("callbacks", "loggers", "profilers", "strategies", "plugins", "accelerators", "demos", "cli")


class LightningCLI(cli.LightningCLI, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        name_classes()
        super().__init__(**given)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a new parser that takes ``--config``; what it prints is a config of Lightning."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={VERSION}"])
        return super().init_parser(**kwargs)

    @functools.cached_property
    def config_dump(self) -> dict[str, Any]:
        """The config as plain data, of the subcommand if there is one."""
        text = self.parser.dump(self.config, skip_link_targets=False, skip_none=False, format="yaml")
        config: dict[str, Any] = need("yaml", purpose="LightningCLI.config_dump").safe_load(text)
        subcommand = self.config.get("subcommand")
        return config[subcommand] if subcommand else config


def name_classes() -> None:
    """Make jsonargparse write and list classes under Lightning's names, while the alias is installed.

    A program then saves configs in Lightning's form, which either library can read.
    """
    known = getattr(jsonargparse_util, "resolved_import_paths", None)
    if known is None or conventions.current() is conventions.HASTEN:
        return  # An older jsonargparse writes hasten's names, which can be read as well.
    root = "pytorch_lightning" if "lightning" not in sys.modules else "lightning"
    for kind, path in _paths(root).items():
        known.add(kind, path)


def forget_classes() -> None:
    """Undo ``name_classes``."""
    known = getattr(jsonargparse_util, "resolved_import_paths", None)
    for kind in _paths("lightning"):
        known._paths.pop(id(kind), None)  # type: ignore[union-attr]


def _paths(root: str) -> dict[type, str]:
    """Return the shortest name of each class that a config may name."""
    found: dict[type, str] = {}
    for place in sorted(TABLE, key=lambda place: place.count(".")):
        if place in ("pytorch", "") or place.removeprefix("pytorch.").partition(".")[0] not in _PACKAGES:
            continue
        module = f"lightning.{place}" if root == "lightning" else place.replace("pytorch", root, 1)
        for name, (home, there) in TABLE[place].items():
            try:
                kind = getattr(importlib.import_module(home), there)
            except ImportError:
                continue  # Its package is not installed.
            if isinstance(kind, type) and is_builtin(kind) and kind.__name__ == name:
                found.setdefault(kind, f"{module}.{name}")
    for name, kind in vars(originals).items():
        if isinstance(kind, type):
            found[kind] = f"{originals.__name__}.{name}"
    return found
