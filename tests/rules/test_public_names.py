"""What is promised is importable, lazily, documented and typed."""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import inspect
import operator

import pytest

import hasten
from tests.programs import fork_python
from tests.refusals import refused

ROOMS = ("callbacks", "loggers", "strategies")


@pytest.mark.parametrize("name", hasten.__all__)
def test_each_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(hasten, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert (value.__doc__ or "").strip(), f"hasten.{name} has no docstring"
    assert name in dir(hasten)
    undocumented = [
        attribute
        for attribute, member in (vars(value).items() if inspect.isclass(value) else ())
        if not attribute.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
        and not inspect.getdoc(getattr(value, attribute, None))
        and not inspect.getdoc(member)
    ]
    assert undocumented == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_lists_its_names_and_has_them(room: str) -> None:
    module = importlib.import_module(f"hasten.{room}")
    assert module.__all__
    for name in module.__all__:
        assert (getattr(module, name).__doc__ or "").strip(), f"hasten.{room}.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error_that_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        hasten.Trianer


def test_the_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files("hasten").joinpath("py.typed").is_file()


def test_names_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, hasten\n"
        "assert 'hasten.trainer' not in sys.modules\n"
        "hasten.Trainer\n"
        "assert 'hasten.trainer' in sys.modules\n"
        "from hasten import *\n"
        "Fabric, LightningModule\n"
    )
    assert fork_python("-c", program).returncode == 0


NAMES = {
    "from hasten import ModelCheckpoint": "Write from hasten.callbacks import ModelCheckpoint.",
    "from hasten import LightningCLI": "Write from hasten.cli import LightningCLI.",
    "from hasten import ModelChekpoint": "Did you mean from hasten.callbacks import ModelCheckpoint?",
    "from hasten import DataLoader": "Write from torch.utils.data import DataLoader.",
    "from hasten import nn": "Write from torch import nn.",
    "from hasten import accelerator": "Did you mean 'accelerators'?",
    "from hasten import Trianer": "'Trainer'",
    "from hasten.callbacks import EarlyStoping": "'EarlyStopping'",
    "from hasten.callbacks import CSVLogger": "Write from hasten.loggers import CSVLogger.",
    "from hasten.metrics import Accuracy": "torchmetrics",
    "from hasten import metrics": "torchmetrics",
    "import hasten.metrics.functional": "torchmetrics",
    "import hasten.callbackz": "'callbacks'",
    "from hasten.pytorch.plugins.io import CheckpointIO": "hasten.plugins",
    "from hasten.pytorch.plugins import Nothing": "hasten.plugins",
    "import hasten.pytorch.metrics": "torchmetrics",
    "from hasten.accelerators import GPUAccelerator": "from hasten.accelerators import CUDAAccelerator",
    "from hasten.callbacks.base import Callback": "from hasten.callbacks import Callback",
    "from hasten.plugins import DDPPlugin": "strategy='ddp'",
    "from hasten.plugins.training_type import DDPPlugin": "strategy='ddp'",
    "from hasten.plugins import MixedPrecison": "'MixedPrecision'",
    "from hasten.pytorch.core.lightning import LightningModule": "from hasten import LightningModule",
    "from hasten.utilities.distributed import rank_zero_only": "from hasten.utilities import rank_zero_only",
}


@pytest.mark.parametrize(("line", "fix"), NAMES.items())
def test_an_import_of_a_name_that_is_elsewhere_or_misspelt_says_what_to_write(line: str, fix: str) -> None:
    with refused(ImportError, fix=fix, says="hasten has no"):
        exec(line)


def test_an_attribute_that_is_elsewhere_says_what_to_write() -> None:
    for place, says in (
        ("ModelCheckpoint", "from hasten.callbacks import"), ("metrics.Accuracy", "torchmetrics"),
        ("accelerators.GPUAccelerator", "from hasten.accelerators import CUDAAccelerator"),
        ("callbacks.base.Callback", "from hasten.callbacks import Callback"),
        ("utilities.distributed.rank_zero_only", "from hasten.utilities import rank_zero_only"),
    ):  # fmt: skip
        with refused(AttributeError, says=says):
            operator.attrgetter(place)(hasten)
    assert issubclass(hasten.utilities.exceptions.MisconfigurationException, ValueError)
    program = "import hasten\nassert hasten.fabric.is_wrapped and hasten.fabric.Fabric is hasten.Fabric\n"
    assert fork_python("-c", program).returncode == 0


def test_asking_for_a_module_that_is_not_there_gives_none() -> None:
    for name in (
        *("hasten.nonsense", "hasten.pytorch.nonsense", "hasten.pytorch.plugins.io", "hasten.metrics"),
        *("hasten.speed.nonsense", "hasten.pytorch.callbacks.lr_monitor", "hasten.fabric.plugins.io"),
    ):
        assert importlib.util.find_spec(name) is None, name
    for name in ("hasten.pytorch.callbacks", "hasten.pytorch.plugins", "hasten.speed.levers", "hasten.loops.fit"):
        assert importlib.util.find_spec(name) is not None, name
