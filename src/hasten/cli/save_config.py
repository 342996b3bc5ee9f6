"""Save the config of a run in the run's folder."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import fsspec
from jsonargparse import Namespace

from hasten._lib.errors import make_error
from hasten.cli.hyperparameters import WITH_NONE
from hasten.hooks import overrides
from hasten.module.callback import Callback
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.cli.parser import LightningArgumentParser


class SaveConfigCallback(Callback):
    """Save the config of a ``LightningCLI`` in the ``log_dir`` of the run, before it starts.

    A fit that resumes from a checkpoint in the same folder saves its config next to the first, as ``config-1.yaml``,
    ``config-2.yaml``, ...

    Args:
        parser: the parser that read the config.
        config: what it read.
        config_filename: the name of the file.
        overwrite: replace an existing config.
        multifile: keep parts that were read from separate files in separate files.
        save_to_log_dir: write the file; False for a subclass whose ``save_config`` keeps it elsewhere.

    Raises:
        ValueError: with ``save_to_log_dir=False`` and without ``save_config`` nothing would be saved.
        RuntimeError: when the run starts: the file is the config of another run, and ``overwrite`` is False.

    Example::

        >>> from hasten.cli import LightningArgumentParser
        >>> parser = LightningArgumentParser()
        >>> SaveConfigCallback(parser, parser.parse_args([]), overwrite=True).config_filename
        'config.yaml'

    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and not overrides(self, SaveConfigCallback, "save_config"):
            what = (
                "`save_to_log_dir=False` only makes sense when subclassing SaveConfigCallback to implement "
                f"`save_config`: {type(self).__name__} would save nothing."
            )
            fix = "Write save_config() in a subclass, or set LightningCLI(save_config_callback=None)."
            raise make_error(ValueError, what, fix=fix, argument="save_to_log_dir")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the config, once, before the first stage that runs."""
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save_to_log_dir(trainer)
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the config somewhere else too; called on the first process only."""

    def _save_to_log_dir(self, trainer: Trainer) -> None:
        log_dir = trainer.log_dir  # Read on all processes: they agree on it.
        if log_dir is None:
            return
        path = os.path.join(log_dir, self.config_filename)
        files = fsspec.core.url_to_fs(path)[0]
        if trainer.state.fn is TrainerFn.FITTING and self.config.get("ckpt_path") is not None:
            # The first free name of config.yaml, config-1.yaml, config-2.yaml, ...
            stem, ending = os.path.splitext(path)
            names = itertools.chain([path], (f"{stem}-{number}{ending}" for number in itertools.count(1)))
            free = next(name for name in names if not files.isfile(name)) if trainer.is_global_zero else path
            path = trainer.strategy.broadcast(free)
        # All processes must fail together: one that went on would wait for the others.
        exists = trainer.is_global_zero and not self.overwrite and bool(files.isfile(path))
        if not self.overwrite and trainer.strategy.broadcast(exists):
            raise make_error(
                RuntimeError,
                f"{type(self).__name__} expected {path} to NOT exist. Aborting to avoid overwriting results of a "
                "previous run.",
                fix=(
                    "Write elsewhere (--trainer.default_root_dir), or set "
                    'LightningCLI(save_config_kwargs={"overwrite": True}).'
                ),
            )
        if trainer.is_global_zero:
            # The logger makes its folder with the first value it writes, which is later.
            files.makedirs(files._parent(path), exist_ok=True)
            self.parser.save(self.config, path, overwrite=True, multifile=self.multifile, **WITH_NONE)
