"""Optimizers and schedulers, linked arguments, hooks, sub-commands: what a LightningCLI is made into."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, StepLR

import hasten as L
from hasten.callbacks import EarlyStopping
from hasten.cli import LightningArgumentParser, LightningCLI, ReduceLROnPlateau, SaveConfigCallback, instantiate_module
from tests.cli.program import QUIET, Injected, LineData, LineNet, cli
from tests.refusals import refused, warned


def adding(add: Callable[[LightningArgumentParser], Any]) -> type[LightningCLI]:
    """Return a LightningCLI whose ``add_arguments_to_parser`` calls ``add``."""
    return type("Own", (LightningCLI,), {"add_arguments_to_parser": lambda self, parser: add(parser)})


def test_optimizer_and_scheduler_from_the_command_line() -> None:
    with warned(UserWarning, says=("`LineNet", "configure_optimizers`", "`LightningCLI")):
        made = cli(
            "fit --lr_scheduler=StepLR --lr_scheduler.step_size=1 --lr_scheduler.gamma=0.5 "
            "--optimizer=Adam --optimizer.lr=0.25",
            run=True,
        )
    optimizer = made.trainer.optimizers[0]
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.param_groups[0]["initial_lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 0.125  # after one epoch
    assert {id(p) for p in made.model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert type(made.trainer.lr_scheduler_configs[0].scheduler) is StepLR
    assert made.config["fit"]["optimizer"]["init_args"]["lr"] == 0.25
    assert optimizer.param_groups[0]["fused"], "hasten made it, so one kernel updates all parameters"


@pytest.mark.filterwarnings("ignore:.*will be overridden")
def test_a_copy_of_the_module_has_the_optimizer_of_its_own_parameters() -> None:
    made = cli("--optimizer=Adam", "--optimizer.lr=0.5", save_config_callback=SaveConfigCallback)
    for other in (copy.deepcopy(made.model), pickle.loads(pickle.dumps(made.model))):
        optimizer = other.configure_optimizers()
        assert type(optimizer) is torch.optim.Adam
        assert {id(p) for p in other.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    saving = next(one for one in made.trainer.callbacks if isinstance(one, SaveConfigCallback))
    assert pickle.loads(pickle.dumps(saving)).config.optimizer.init_args.lr == 0.5


@pytest.mark.filterwarnings("ignore:.*will be overridden")
def test_a_scheduler_that_watches_a_value() -> None:
    made = cli(
        "fit --optimizer=SGD --optimizer.lr=1 --lr_scheduler=ReduceLROnPlateau "
        "--lr_scheduler.monitor=val_loss --lr_scheduler.patience=4",
        run=True,
    )
    config = made.trainer.lr_scheduler_configs[0]
    assert type(config.scheduler) is ReduceLROnPlateau
    assert (config.monitor, config.reduce_on_plateau, config.scheduler.patience) == ("val_loss", True, 4)
    assert made.config["fit"]["lr_scheduler"]["class_path"] == "hasten.cli.ReduceLROnPlateau"


@pytest.mark.filterwarnings("ignore:.*will be overridden")
def test_one_optimizer_class_and_other_defaults() -> None:
    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.RMSprop)
        parser.add_lr_scheduler_args(ConstantLR)
        parser.set_defaults({"optimizer.lr": 0.125, "lr_scheduler.total_iters": 9})

    made = cli("fit", "--optimizer.alpha=0.5", run=True, kind=own)
    group = made.trainer.optimizers[0].param_groups[0]
    assert type(made.trainer.optimizers[0]) is torch.optim.RMSprop
    assert (group["initial_lr"], group["alpha"]) == (0.125, 0.5)
    assert made.trainer.lr_scheduler_configs[0].scheduler.total_iters == 9


@pytest.mark.filterwarnings("ignore:.*will be overridden")
def test_configure_optimizers_of_the_cli() -> None:
    class Own(LightningCLI):
        @staticmethod
        def configure_optimizers(lightning_module: Any, lr_scheduler: Any = None, **given: Any) -> Any:
            lightning_module.seen = (given["optimizer"], lr_scheduler)
            return {**given, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    words = "fit --optimizer=SGD --optimizer.lr=1 --lr_scheduler=StepLR --lr_scheduler.step_size=9"
    made = cli(words, run=True, kind=Own)
    assert made.trainer.lr_scheduler_configs[0].interval == "step"
    assert made.model.seen[0] is made.trainer.optimizers[0]


class TwoOptimizers(L.LightningModule):
    """A module that is given the configs of two optimizers."""

    def __init__(self, first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = first, second


def test_several_optimizers_are_linked_to_the_module() -> None:
    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(nested_key="one", link_to="model.first")
        parser.add_optimizer_args(torch.optim.Adam, nested_key="two", link_to="model.second")

    made = cli("--one=SGD", "--one.lr=0.5", "--two.lr=0.25", kind=own, model_class=TwoOptimizers)
    assert made.model.first["class_path"] == "torch.optim.SGD"
    assert made.model.first["init_args"]["lr"] == 0.5
    assert made.model.second["class_path"] in ("torch.optim.adam.Adam", "torch.optim.Adam")
    assert made.model.second["init_args"]["lr"] == 0.25
    again = instantiate_module(TwoOptimizers, made.model.hparams)
    assert (again.first, again.second["class_path"]) == (made.model.first, made.model.second["class_path"])


def test_two_automatic_optimizers_are_refused() -> None:
    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(nested_key="one")
        parser.add_optimizer_args(nested_key="two")

    with refused(ValueError, says=("lr_scheduler", "['one'", "'two'", "'lr_scheduler'")):
        cli(kind=own)


def test_makers_of_optimizers_are_injected() -> None:
    made = cli("--model.width=3", model_class=Injected)
    assert type(made.model.configure_optimizers()["optimizer"]) is torch.optim.Adam
    other = cli(
        "--model.optimizer=SGD --model.optimizer.lr=0.5 --model.scheduler=StepLR --model.scheduler.step_size=7",
        model_class=Injected,
    ).model.configure_optimizers()
    assert type(other["optimizer"]) is torch.optim.SGD
    assert other["optimizer"].param_groups[0]["lr"] == 0.5
    assert (type(other["lr_scheduler"]), other["lr_scheduler"].step_size) == (StepLR, 7)
    watched = cli(
        "--model.scheduler=hasten.cli.ReduceLROnPlateau --model.scheduler.monitor=loss", model_class=Injected
    ).model.configure_optimizers()
    assert watched["lr_scheduler"].monitor == "loss"


def test_linked_arguments() -> None:
    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.width", compute_fn=lambda size: size * 2)
        parser.link_arguments("data.classes", "model.lr", apply_on="instantiate")

    made = cli("--data.batch_size=6", kind=own)
    assert (made.model.width, made.model.lr) == (12, 2)
    assert made.model.hparams.width == 12
    assert made.model.hparams.lr == 2

    @adding
    def in_subclass_mode(parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.init_args.width", compute_fn=lambda size: size * 2)
        parser.link_arguments("data.classes", "model.init_args.lr", apply_on="instantiate")

    again = cli("--model=LineNet", "--data.batch_size=6", kind=in_subclass_mode, model_class=None)
    assert (again.model.width, again.model.hparams.lr) == (12, 2)


def test_a_callback_with_options_of_its_own() -> None:
    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "val_loss"})

    made = cli("fit", "--stopping.patience=7", kind=own, run=True)
    stopping = [one for one in made.trainer.callbacks if isinstance(one, EarlyStopping)]
    assert len(stopping) == 1
    assert (stopping[0].monitor, stopping[0].patience) == ("val_loss", 7)


def test_the_moments_of_a_run_in_order() -> None:
    class Own(LightningCLI):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen: list[str] = []
            super().__init__(*args, **kwargs)

        def before_instantiate_classes(self) -> None:
            self.seen.append(f"before, model: {hasattr(self, 'model')}")

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            return super().instantiate_trainer(max_epochs=2, **kwargs)

        def after_instantiate_classes(self) -> None:
            self.seen.append(f"after, model: {hasattr(self, 'model')}")

        def before_fit(self) -> None:
            self.seen.append(f"before_fit {self.trainer.global_step}")

        def after_fit(self) -> None:
            self.seen.append(f"after_fit {self.trainer.global_step}")

    made = ["before, model: False", "after, model: True"]
    assert cli("fit", kind=Own, run=True).seen == [*made, "before_fit 0", "after_fit 4"]
    assert cli("validate", kind=Own, run=True).seen == made


def test_a_subcommand_of_the_cli_takes_the_place_of_the_trainers() -> None:
    class Own(LightningCLI):
        def _parse_ckpt_path(self) -> None:
            self.config["fit"]["ckpt_path"] += ".ckpt"

        def fit(self, model: Any, datamodule: Any, ckpt_path: Any, **kwargs: Any) -> None:
            self.got = (model, datamodule, ckpt_path, sorted(kwargs))

    made: Any = cli("fit", "--ckpt_path=some", kind=Own, run=True)
    assert made.got == (made.model, made.datamodule, "some.ckpt", ["weights_only"])
    assert made.trainer.global_step == 0


def test_every_subcommand_runs_its_method(capsys: pytest.CaptureFixture[str]) -> None:
    for subcommand in ("fit", "validate", "test", "predict"):
        made = cli(subcommand, run=True)
        assert (made.trainer.state.fn.value, made.trainer.state.status.value) == (subcommand, "finished")
        assert made.trainer.datamodule is made.datamodule
        assert ("val_loss" in capsys.readouterr().out) == (subcommand == "validate")
        assert [type(one) for one in made.trainer.optimizers] == [torch.optim.SGD] * (subcommand == "fit")
    cli("validate", "--verbose=false", run=True)
    assert "val_loss" not in capsys.readouterr().out


def test_subcommands_of_ones_own() -> None:
    class Counting(L.Trainer):
        def count(self, model: L.LightningModule, to: int = 2) -> None:
            """Count."""
            model.counted = list(range(to))

    class Own(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**LightningCLI.subcommands(), "count": {"model"}}

        def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
            kwargs = super()._prepare_subcommand_kwargs(subcommand)
            kwargs.pop("datamodule")
            return kwargs

    made = cli("count", "--to=4", kind=Own, trainer_class=Counting, run=True)
    assert made.model.counted == [0, 1, 2, 3]
    evaluated = {key: {"model", "dataloaders", "datamodule"} for key in ("validate", "test", "predict")}
    fitted = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
    assert LightningCLI.subcommands() == {"fit": fitted, **evaluated}


def test_a_parser_class_and_options_of_ones_own() -> None:
    class OwnParser(LightningArgumentParser):
        pass

    @adding
    def own(parser: LightningArgumentParser) -> None:
        parser.add_argument("--tag", default="none")
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--sizes", nargs="+", type=int)

    words = ["--tag", "x", "--fast", "--sizes", "1", "2", "--model.width=3"]
    made = cli(*words, kind=own, parser_class=OwnParser)
    assert type(made.parser) is OwnParser
    assert (made.config["tag"], made.config["fast"], made.config["sizes"]) == ("x", True, [1, 2])
    assert made.model.width == 3
    run = cli("fit", "--fast", "--sizes", "1", "2", "--tag=y", kind=own, run=True)
    assert (run.config["fit"]["fast"], run.config["fit"]["sizes"], run.config["fit"]["tag"]) == (True, [1, 2], "y")


def test_a_program_without_a_datamodule() -> None:
    class WithData(LineNet):
        def train_dataloader(self) -> Any:
            return LineData().train_dataloader()

    made = LightningCLI(WithData, trainer_defaults=QUIET, save_config_callback=None, args=["fit"])
    assert made.datamodule is None
    assert made.trainer.global_step == 2


def test_arguments_of_torchs_profiler_are_arguments_of_the_class() -> None:
    words = ("--trainer.profiler=PyTorchProfiler", "--trainer.profiler.record_shapes=true")
    made = cli(*words, "--trainer.profiler.dict_kwargs.profile_memory=true")
    chosen = made.config["trainer"]["profiler"]
    assert (chosen["init_args"]["record_shapes"], chosen["dict_kwargs"]) == (True, {"profile_memory": True})
