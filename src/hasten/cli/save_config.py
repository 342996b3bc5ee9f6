"""The config of a run, saved beside what the run writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import fsspec
from jsonargparse import Namespace

from hasten.hooks import overrides
from hasten.loops.progress import TrainerFn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.cli.parser import LightningArgumentParser
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class SaveConfigCallback(Callback):
    """Save the config of a ``LightningCLI`` in the ``log_dir`` of the run, before it starts.

    A fit that goes on from a checkpoint in the folder of the run before it saves its own beside the first, as
    ``config-1.yaml`` and so on.

    Args:
        parser: the parser that read the config.
        config: what it read.
        config_filename: the name of the file.
        overwrite: replace a config that is there already.
        multifile: keep parts that were read from files of their own as files of their own.
        save_to_log_dir: write the file; False for a subclass whose ``save_config`` keeps it elsewhere.

    Raises:
        ValueError: with ``save_to_log_dir=False`` and without ``save_config`` nothing would be saved.
        RuntimeError: when the run starts: there is a config of another run, and ``overwrite`` is False.

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
            raise ValueError(
                f"{type(self).__name__}(save_to_log_dir=False): nothing would be saved. Write save_config() in a "
                "subclass, or set LightningCLI(save_config_callback=None)."
            )

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
        log_dir = trainer.log_dir  # All processes ask: they agree on it.
        if log_dir is None:
            return
        path = os.path.join(log_dir, self.config_filename)
        if trainer.state.fn == TrainerFn.FITTING and self.config.get("ckpt_path") is not None:
            path = trainer.strategy.broadcast(_free_name(path) if trainer.is_global_zero else path)
        files, in_files = fsspec.core.url_to_fs(path)
        if not self.overwrite:
            # All processes must fail together: one that went on would wait for the others.
            exists = trainer.strategy.broadcast(
                bool(files.isfile(in_files)) if trainer.is_global_zero else False
            )
            if exists:
                raise RuntimeError(
                    f"{type(self).__name__} expected {path} to NOT exist: it is the config of another run, and is "
                    "kept. Write elsewhere (--trainer.default_root_dir, or a logger with another name or version), "
                    'delete it, or set LightningCLI(save_config_kwargs={"overwrite": True}) or '
                    "LightningCLI(save_config_callback=None)."
                )
        if trainer.is_global_zero:
            # The logger makes its folder with the first value it writes, which is later.
            files.makedirs(files._parent(in_files), exist_ok=True)
            self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=self.multifile)


def _free_name(path: str) -> str:
    """Return ``path``, or where there is one already, the first free one of config-1.yaml, config-2.yaml, ..."""
    files, in_files = fsspec.core.url_to_fs(path)
    stem, ending = os.path.splitext(path)
    number = 0
    while files.isfile(in_files):
        number += 1
        path = f"{stem}-{number}{ending}"
        in_files = fsspec.core.url_to_fs(path)[1]
    return path
