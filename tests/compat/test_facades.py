"""Facades: under Lightning's names, classes have Lightning's parameters, and are hasten's classes."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import sys
from abc import ABC
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import hasten
import hasten_lightning
from hasten.commands import main
from hasten_lightning import environment
from hasten_lightning.commands.run import OWN_ARGUMENTS
from hasten_lightning.facades import Facade, original
from hasten_lightning.modules import TABLE
from hasten_lightning.signatures import sections
from tests.refusals import refused, warned

SIGNATURES = Path(__file__).parent / "signatures.txt"
QUIETLY = {"accelerator": "cpu", "logger": False}


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def signatures() -> dict[str, str]:
    """Return the parameters of Lightning's classes by full name."""
    text = SIGNATURES.read_text().replace("\n    ", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        module, _, written = line.partition(": ")
        name, _, parameters = written.partition("(")
        found[f"{module}.{name}"] = parameters.removesuffix(")")
    return found


def written(kind: Any) -> str:
    """Return the parameters of a class as the table writes them."""
    words, seen = [], False
    for each in inspect.signature(kind).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not seen:
            words.append("*")
        seen |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        default = "" if each.default is each.empty else f"={each.default!r}"
        default = "=..." if default.startswith("=<") else default
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{stars}{each.name}{default}")
    return ", ".join(words).replace("datetime.timedelta(seconds=1800)", "30min")


def facades() -> dict[str, Any]:
    """Return all facades by the names that programs import."""
    found = {}
    for module, names in TABLE.items():
        for name, (home, there) in names.items():
            value = getattr(importlib.import_module(home), there) if home.startswith("hasten_lightning.") else None
            if isinstance(value, Facade):
                found[f"{module}.{name}".lstrip(".")] = value
    return found


def test_classes_have_the_parameters_of_lightning() -> None:
    wrong = {}
    for full_name, parameters in signatures().items():
        module, _, name = full_name.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if inspect.isclass(kind) and issubclass(kind, Enum):
            continue  # Their parameters are Python's, and differ with its version.
        ours = written(kind)
        if ours != parameters:
            wrong[full_name] = f"{ours}\n    instead of\n{parameters}"
    assert wrong == {}


def test_each_signature_of_the_table_is_that_of_a_facade_and_has_types() -> None:
    kinds = {f"{kind.__module__}.{kind.__qualname__}".partition(".")[2]: kind for kind in facades().values()}
    found: set[str] = set()
    texts: dict[str, str] = {}
    for name in sections()["signatures"]:
        parameters = inspect.signature(kinds[name]).parameters.values()
        assert not [each.name for each in parameters if each.annotation is each.empty], name
        texts |= {each.name: each.annotation for each in parameters if isinstance(each.annotation, str)}
        found |= {each.name for each in parameters}
    # To import these takes a second.
    assert texts == {"cpu_offload": "bool | CPUOffloadPolicy | None", "mixed_precision": "MixedPrecisionPolicy | None"}
    assert {name for names in sections()["types"].values() for name in names.split()} <= found, "no class has it"


def test_command_lines_find_types_that_take_long_to_import() -> None:
    from jsonargparse import ArgumentParser
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import CPUOffloadPolicy

    parser = ArgumentParser()
    parser.add_class_arguments(FSDPStrategy, "strategy")
    policy = {"class_path": "torch.distributed.fsdp.CPUOffloadPolicy", "init_args": {"pin_memory": False}}
    made = parser.instantiate(parser.parse_object({"strategy": {"cpu_offload": policy}}))
    assert made.strategy.kwargs["use_orig_params"]
    assert isinstance(made.strategy.cpu_offload, CPUOffloadPolicy)


def test_a_missing_or_further_argument_names_the_class() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    with refused(TypeError, says=("MixedPrecision.__init__()", "'device'")):
        MixedPrecision("16-mixed")
    with refused(TypeError, says="MixedPrecision.__init__()"):
        MixedPrecision("16-mixed", "cpu", None, 3)


def test_a_facade_refuses_what_only_hasten_has_and_says_how_to_pass_it() -> None:
    refused = 0
    for facade in facades().values():
        known = inspect.signature(facade).parameters
        concrete = type(facade.__name__, (facade,), dict.fromkeys(facade.__abstractmethods__))
        for each in inspect.signature(original(facade)).parameters.values():
            if each.name not in known and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD):
                with pytest.raises(TypeError, match=rf"argument '{each.name}'.*(set HASTEN_|Import hasten to use )"):
                    concrete(**{each.name: 1})
                refused += 1
    assert refused > 20


def test_subclasses_forward_and_are_refused_alike() -> None:
    import lightning.pytorch as pl

    class Own(pl.Trainer):
        def __init__(self, extra: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.extra = extra

    trainer = Own(extra=3, max_epochs=2, **QUIETLY)
    assert (trainer.extra, trainer.max_epochs) == (3, 2)
    assert trainer.with_arguments(max_epochs=5).extra == 3
    assert copy.copy(trainer).max_epochs == 2
    with refused(TypeError, says="HASTEN_PACKED=1"):
        Own(packed=True)
    with refused(TypeError, "max_epoch", fix="'max_epochs'"):
        Own(max_epoch=1)
    with refused(TypeError, "gpus", fix="Trainer(accelerator='gpu', devices=2)"):
        pl.Trainer(gpus=2)  # type: ignore[call-arg]


def test_objects_of_hastens_classes_are_instances_but_not_of_subclasses() -> None:
    import lightning as L
    from lightning.fabric import strategies as of_fabric
    from lightning.pytorch import strategies

    class Own(L.Trainer):
        pass

    class Mixed(strategies.DDPStrategy, ABC):
        pass

    plain, own = hasten.Trainer(**QUIETLY), Own(**QUIETLY)
    assert isinstance(plain, L.Trainer)
    assert isinstance(own, hasten.Trainer)
    assert not isinstance(plain, Own)
    assert not isinstance(3, L.Trainer)
    assert issubclass(hasten.Trainer, L.Trainer)
    assert issubclass(Mixed, strategies.ParallelStrategy)
    assert issubclass(Mixed, of_fabric.DDPStrategy)
    assert not issubclass(Mixed, strategies.FSDPStrategy)
    assert not issubclass(int, hasten.strategies.Strategy)
    # What the Trainer chose by name is what the program would have made.
    chosen = L.Trainer(strategy="ddp", devices=1, **QUIETLY).strategy
    assert type(chosen) is strategies.DDPStrategy
    assert type(own.strategy) is strategies.SingleDeviceStrategy
    assert type(own.with_arguments(strategy="ddp").strategy) is strategies.DDPStrategy
    mine = hasten.strategies.DDPStrategy()
    assert type(L.Trainer(strategy=mine, devices=1, **QUIETLY).strategy) is hasten.strategies.DDPStrategy
    assert type(L.Fabric(accelerator="cpu").strategy) is of_fabric.SingleDeviceStrategy


def test_a_logger_may_be_both_one_of_fabric_and_one_of_the_trainer() -> None:
    # As that of DVCLive.
    from lightning.fabric.loggers.logger import Logger as LoggerOfFabric
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loggers.logger import Logger

    class Rows(LoggerOfFabric):  # type: ignore[misc, valid-type]
        name = "rows"
        version = 0

        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int | None] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.steps.append(step)

        def log_hyperparams(self, params: Any) -> None:
            pass

    class RowsOfTrainer(Logger, Rows):  # type: ignore[misc, valid-type]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            super().log_metrics(metrics, step)

    class Model(BoringModel):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            self.log("loss", loss)
            return loss

    logger = RowsOfTrainer()
    options = {"max_steps": 2, "log_every_n_steps": 1, "enable_checkpointing": False, "accelerator": "cpu"}
    Trainer(**options, logger=logger).fit(Model())
    assert logger.steps == [0, 1]
    assert issubclass(Logger, LoggerOfFabric)
    assert issubclass(CSVLogger, Logger)
    assert isinstance(logger, hasten.loggers.Logger)


def test_facades_pickle_and_forward_what_they_get() -> None:
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    for facade in facades().values():
        assert pickle.loads(pickle.dumps(facade)) is facade
        assert facade.__doc__
    strategy = DDPStrategy(find_unused_parameters=True, timeout=timedelta(minutes=3), start_method="spawn")
    assert strategy.name == "ddp_spawn"
    with refused(ValueError, "model_averaging_period", says="DDPStrategy(model_averaging_period=...)"):
        DDPStrategy(model_averaging_period=2)
    assert MixedPrecision("bf16-mixed", "cpu").device == "cpu"
    assert LambdaCallback(lambda *_: 3).setup(None, None, None) == 3  # type: ignore[func-returns-value]
    with refused(TypeError, "on_setup", fix="setup"):
        LambdaCallback(on_setup=print)


def test_arguments_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning as L
    from lightning.pytorch.utilities import argparse

    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_ALGORITHM", "value")
    monkeypatch.setenv("HASTEN_BATCHING", "length")
    monkeypatch.setenv("HASTEN_NUM_WORKERS", " 2 ")
    monkeypatch.setenv("HASTEN_PACKED", "1")
    monkeypatch.setenv("HASTEN_ON_BAD_LOSS", "skip")
    monkeypatch.setenv("HASTEN_COMPILE", '{"dynamic": true}')
    monkeypatch.setenv("HASTEN_FUSED_OPTIMIZER", "")
    given = L.Trainer(**QUIETLY).given_arguments
    assert (given["max_epochs"], given["gradient_clip_algorithm"]) == (7, "value")
    assert (given["batching"], given["num_workers"], given["packed"]) == ("length", 2, True)
    assert (given["on_bad_loss"], given["compile"], given["fused_optimizer"]) == ("skip", {"dynamic": True}, None)
    assert L.Trainer(max_epochs=1, **QUIETLY).max_epochs == 1
    assert L.Trainer("cpu", logger=False).max_epochs == 7  # type: ignore[misc]
    assert L.Trainer(sync_batchnorm=None, **QUIETLY).given_arguments["sync_batchnorm"] is False  # type: ignore[arg-type]
    monkeypatch.setenv("PL_OPTIONS_WIDTH", "5")

    class Options:
        @argparse._defaults_from_env_vars
        def __init__(me, width: int = 1) -> None:  # noqa: N805
            me.width = width

    assert (Options().width, Options(2).width) == (5, 2)
    # Those of Lightning's names alone.
    assert hasten.Trainer(**QUIETLY).given_arguments["packed"] is False


@pytest.mark.parametrize(
    ("variable", "text", "fact"),
    [
        ("HASTEN_PACKED", "maybe", "HASTEN_PACKED='maybe'"),
        ("HASTEN_NUM_WORKERS", "-2", "HASTEN_NUM_WORKERS='-2'"),
        ("HASTEN_COMPILE", '{"dynamic', "HASTEN_COMPILE='{\"dynamic'"),
        ("HASTEN_UNEVEN", "wait", "HASTEN_UNEVEN='wait'"),
    ],
)
def test_a_wrong_value_names_the_variable_and_what_is_allowed(
    variable: str, text: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning as L

    monkeypatch.setenv(variable, text)
    with refused(ValueError, says=fact):
        L.Trainer(**QUIETLY)


def test_hasten_run_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name for name, *_ in OWN_ARGUMENTS} == set(environment.OWNERS["Trainer"])
    for name in environment.OWNERS["Trainer"]:
        monkeypatch.setenv(environment.variable(name), "")  # For its removal.
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, lightning as L\n"
        "given = L.Trainer(accelerator='cpu', logger=False).given_arguments\n"
        "print(sys.argv[1:], given['packed'], given['batch_size'], given['resident'], given['speed'])\n"
    )
    monkeypatch.setattr("sys.argv", ["hasten"])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr("hasten.machine.launch.PREFIX", [])
    assert main(["run", "--packed", "--batch-size", "8", "--resident=auto", str(program), "--packed", "x"]) == 0
    assert "['--packed', 'x'] True 8 auto None" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", "--batch-size", "many", str(program)])
    assert re.search(r"--batch-size: use a number of samples.* Got 'many'", capsys.readouterr().err)


def test_devices_are_resolved_as_by_the_trainer() -> None:
    import lightning as L
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    alone = _AcceleratorConnector(accelerator="cpu", precision="bf16-mixed")
    assert (alone._accelerator_flag, alone._devices_flag, alone._precision_flag) == ("cpu", 1, "bf16-mixed")
    assert alone._check_and_init_precision() is alone.precision_plugin
    assert alone._choose_auto_accelerator() == L.Trainer(logger=False).accelerator.name()
    trainer = L.Trainer(strategy="ddp", devices=2, plugins=[L.pytorch.plugins.TorchCheckpointIO()], **QUIETLY)
    connector = trainer._accelerator_connector
    assert (connector._devices_flag, len(connector._parallel_devices), connector._strategy_flag) == (2, 2, "ddp")
    assert (connector.is_distributed, alone.is_distributed) == (True, False)
    half = L.pytorch.plugins.HalfPrecision("bf16-true")
    given = [_AcceleratorConnector(accelerator="cpu", plugins=plugins) for plugins in (half, [half])]
    assert [each._precision_plugin_flag for each in (*given, connector, alone)] == [half, half, None, None]
    assert connector.strategy is trainer.strategy
    assert connector.accelerator is trainer.accelerator
    assert (connector.checkpoint_io, connector._num_nodes_flag) == (trainer._runtime.checkpoint_io, 1)


def test_callbacks_read_how_values_of_several_loaders_are_named() -> None:
    import lightning as L
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[str] = []
    reads = LambdaCallback(on_validation_start=lambda trainer, _: seen.append(trainer._results.DATALOADER_SUFFIX))
    trainer = L.Trainer(callbacks=[reads], **QUIETLY)
    trainer.validate(BoringModel(), verbose=False)
    assert (seen, trainer._results) == (["/dataloader_idx_{}"], None)


def test_a_programs_strategy_has_the_abstract_methods_of_lightnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import torch
    from lightning.fabric import Fabric  # type: ignore[import-not-found]
    from lightning.fabric import strategies as of_fabric
    from lightning.pytorch import Trainer, strategies  # type: ignore[import-not-found]
    from lightning.pytorch.demos.boring_classes import BoringModel  # type: ignore[import-not-found]

    class Own:
        root_device, is_global_zero = torch.device("cpu"), True

        def module_to_device(self, module: torch.nn.Module) -> None:
            module.to(self.root_device)

        def model_to_device(self) -> None: ...
        def barrier(self, name: str | None = None) -> None: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

        def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
            return tensor

        def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return tensor

    class OfFabric(Own, of_fabric.Strategy):  # type: ignore[misc]
        all_reduce = Own.reduce

    class OfTrainer(Own, strategies.Strategy): ...  # type: ignore[misc]

    class Parallel(Own, of_fabric.ParallelStrategy): ...  # type: ignore[misc]

    layer = torch.nn.Linear(2, 2)
    fabric = Fabric(accelerator="cpu", strategy=OfFabric())
    fabric.launch()
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    trainer = Trainer(accelerator="cpu", strategy=OfTrainer(), max_steps=1, logger=False)
    trainer.fit(BoringModel())
    assert trainer.strategy.all_reduce(3) == 3
    assert Parallel().setup_module(layer) is layer


def test_variables_of_the_environment_are_arguments_of_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    for name, value in {"ACCELERATOR": "cpu", "DEVICES": "2", "STRATEGY": "ddp", "PRECISION": "64-true"}.items():
        monkeypatch.setenv(f"LT_{name}", value)
    with warned(UserWarning, says=("precision='32-true'", "LT_PRECISION=64-true")):
        fabric = Fabric(precision="32-true")
    assert (fabric.world_size, fabric.strategy.name) == (2, "ddp")
    assert fabric.strategy.precision.precision == "64-true"


def test_fabric_in_a_program_that_a_command_line_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    monkeypatch.setenv("LT_CLI_USED", "1")
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.barrier()
    with refused(RuntimeError, says="LT_CLI_USED=1"):
        fabric.launch()
    with refused(TypeError, says=("Runs.run()", "LT_CLI_USED=1")):
        type("Runs", (Fabric,), {"run": lambda self: None})(accelerator="cpu", devices=1)
    monkeypatch.setenv("LT_DEVICES", "1")
    with refused(ValueError, "devices", says=("devices=2", "LT_DEVICES=1")):
        Fabric(accelerator="cpu", devices=2)


def recording(base: type, called: list[str], *names: str) -> type:
    """Return a subclass of ``base`` that notes the calls of methods."""

    def make(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return method

    return type("Own", (base,), {name: make(name) for name in names})


def test_fabric_calls_what_a_program_has_overridden_in_its_strategy_or_precision(tmp_path: Path) -> None:
    import torch
    from lightning.fabric import Fabric  # type: ignore[import-not-found]
    from lightning.fabric.plugins import Precision  # type: ignore[import-not-found]
    from lightning.fabric.strategies import SingleDeviceStrategy  # type: ignore[import-not-found]
    from lightning.fabric.utilities.rank_zero import LightningDeprecationWarning  # type: ignore[import-not-found]

    called: list[str] = []
    of_setup = ("module_init_context", "tensor_init_context", "module_to_device", "process_dataloader", "setup_module")
    of_setup = (*of_setup, "setup_module_and_optimizers", "setup_optimizer")
    of_step = ("clip_gradients_norm", "clip_gradients_value")
    of_files = ("save_checkpoint", "load_checkpoint")
    of_states = ("get_module_state_dict", "get_optimizer_state", "load_module_state_dict")
    kind = recording(SingleDeviceStrategy, called, *of_setup, *of_step, *of_files, *of_states)
    fabric = Fabric(strategy=kind(torch.device("cpu")))
    with fabric.init_module(), fabric.init_tensor():
        layer = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert sorted(called) == sorted({*of_setup} - {"process_dataloader"})
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(2)))
    assert called.pop() == "process_dataloader"
    assert [batch.item() for batch in loader] == [0, 1]
    fabric.setup_optimizers(torch.optim.SGD(layer.parameters(), lr=0.1))
    assert called.pop() == "setup_optimizer"
    fabric.to_device(torch.nn.Linear(1, 1))
    assert called.pop() == "module_to_device"
    called.clear()
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=0.5) == pytest.approx(3**0.5)
    fabric.clip_gradients(model, optimizer, clip_val=0.1)
    assert layer.bias.grad == torch.tensor([0.1])
    assert optimizer.state_dict()["param_groups"]
    state = {"model": model, "optimizer": optimizer, "step": 3}
    weight = layer.weight.clone()
    fabric.save(tmp_path / "one.ckpt", state)
    layer.weight.data.zero_()
    state["step"] = 0
    assert fabric.load(tmp_path / "one.ckpt", state) == {}
    assert torch.equal(layer.weight, weight)
    assert state["step"] == 3
    saved = ["save_checkpoint", "get_module_state_dict", "get_optimizer_state"]
    assert called == [*of_step, "get_optimizer_state", *saved, "load_checkpoint", "load_module_state_dict"]
    torch.save(layer.state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert called[-2:] == ["load_checkpoint", "load_module_state_dict"]

    # The methods for states alone, and those of a precision.
    called.clear()
    of_precision = ("main_params", "unscale_gradients")
    precision = recording(Precision, called, *of_precision)()
    fabric = Fabric(strategy=recording(SingleDeviceStrategy, called, *of_states)("cpu", precision=precision))
    layer = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=0.5) == pytest.approx(3**0.5)
    fabric.save(tmp_path / "two.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load(tmp_path / "two.ckpt", {"model": model})
    assert sorted(called) == sorted((*of_precision, *of_states))

    # loss.backward() would leave out the backward of the program.
    fabric = Fabric(strategy=recording(SingleDeviceStrategy, called, "backward")("cpu"))
    loss = fabric.setup(layer)(torch.ones(1, 2)).sum()
    with refused(RuntimeError, fix="fabric.backward(loss)"):
        loss.backward()
    fabric.backward(loss)
    assert called[-1] == "backward"
    with warned(LightningDeprecationWarning, says="fabric.init_module()"), fabric.sharded_model():
        pass


def test_a_precision_that_is_assigned_to_a_strategy_is_used() -> None:
    import torch
    from lightning.pytorch import Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.demos.boring_classes import BoringModel  # type: ignore[import-not-found]
    from lightning.pytorch.plugins import MixedPrecision  # type: ignore[import-not-found]
    from lightning.pytorch.strategies import SingleDeviceStrategy  # type: ignore[import-not-found]

    before, after = MixedPrecision("bf16-mixed", "cpu"), MixedPrecision("bf16-mixed", "cpu")
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    strategy.precision_plugin = before
    trainer = Trainer(strategy=strategy, fast_dev_run=1, enable_progress_bar=False, **QUIETLY)
    assert trainer.precision_plugin is before
    trainer.strategy.precision_plugin = after
    trainer.fit(BoringModel())
    assert trainer.precision_plugin is after


def test_a_trainer_of_a_program_sets_what_trainers_have_before_it_is_made() -> None:
    import lightning.pytorch as pl

    class Own(pl.Trainer):
        def __init__(self) -> None:
            self.logger = None
            self.log_every_n_steps = 0
            self.wide = True
            super().__init__(**QUIETLY | {"log_every_n_steps": 7})

    assert Own().loggers == []
    assert Own().log_every_n_steps == 7


def test_a_config_may_name_each_class_without_its_module() -> None:
    originals = vars(importlib.import_module("hasten_lightning._classes.originals"))
    for name in ("callbacks", "environments", "loggers"):
        module = importlib.import_module(f"hasten_lightning._classes.{name}")
        facades = {each for each in vars(module).values() if isinstance(each, Facade) and each.behind is not None}
        assert facades
        assert all(each.behind in originals.values() for each in facades)
