"""LightningCLI under Lightning's names: its Trainer has the parameters of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten import cli
from hasten.cli import ArgsType, LightningArgumentParser, SaveConfigCallback
from hasten.compat.facades import Facade, exactly
from hasten.compat.trainer import Trainer
from hasten.module import LightningModule
from hasten.module.datamodule import LightningDataModule


class LightningCLI(cli.LightningCLI, metaclass=Facade):
    @exactly
    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | dict[str, dict[str, Any]] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**given)
