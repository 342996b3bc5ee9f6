"""The names of Lightning, in its modules, lead to hasten's objects."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
import hasten_lightning
from hasten.checkpoint.files import CheckpointRefused
from hasten_lightning.facades import original
from hasten_lightning.modules import ROOTS, TABLE, AliasModule, all_modules, relative
from tests.models import quiet
from tests.refusals import refused, warned

SURFACE = Path(__file__).parent / "surface.txt"


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def surface() -> list[tuple[str, list[str]]]:
    """Return the public names of Lightning, module by module."""
    rows = [line.partition(":") for line in SURFACE.read_text().splitlines() if line and line[0] != "#"]
    return [(module, names.split()) for module, _, names in rows]


@pytest.mark.parametrize(("module", "names"), surface(), ids=[module for module, _ in surface()])
def test_the_public_names_are_there(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


FAMILIES = (
    "accelerators", "callbacks", "cli", "demos", "demos.boring_classes", "loggers", "plugins", "profilers",
    "strategies", "tuner", "utilities",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_everyday_families_have_them_under_hasten(family: str) -> None:
    module = f"lightning.pytorch.{family}"
    ours, theirs = importlib.import_module(f"hasten.{family}"), importlib.import_module(module)
    names = dict(surface())[module]
    assert names
    for name in names:
        assert getattr(ours, name) is original(getattr(theirs, name)), name


def test_every_name_of_the_table_can_be_had() -> None:
    count = 0
    for name in all_modules(["lightning"]):
        module = importlib.import_module(name)
        assert module.__name__ == name
        for each in TABLE[relative(name) or ""]:
            assert getattr(module, each) is not None
            assert each in dir(module)
            count += 1
    assert count > 500


def test_all_packages_of_the_field_have_the_same_objects() -> None:
    import lightning
    import lightning.fabric
    import lightning.pytorch as pl
    import lightning_fabric
    import pytorch_lightning
    from pytorch_lightning.trainer.trainer import Trainer

    assert lightning.Trainer is pl.Trainer is pytorch_lightning.Trainer is Trainer
    assert lightning.Fabric is lightning.fabric.Fabric is lightning_fabric.Fabric
    assert (original(Trainer), original(lightning.Fabric)) == (hasten.Trainer, hasten.Fabric)
    assert not hasattr(pytorch_lightning, "Fabric")
    assert set(ROOTS) == {"lightning", "pytorch_lightning", "lightning_fabric"}


def test_helpers_that_packages_import_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from lightning.fabric.plugins.collectives.collective import CollectibleGroup
    from lightning.fabric.plugins.environments.lightning import find_free_network_port
    from lightning.fabric.utilities import types
    from lightning.fabric.utilities.optimizer import _optimizers_to_device
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

    assert types.CollectibleGroup is CollectibleGroup
    state, drawn = _collect_rng_states(False), torch.rand(1)
    _set_rng_states(state)
    assert torch.equal(torch.rand(1), drawn)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    _optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[weight]["exp_avg"].is_meta
    assert find_free_network_port() > 0
    monkeypatch.setenv("STANDALONE_PORT", "1234")
    assert find_free_network_port() == 1234


def test_modules_are_reached_as_attributes_without_an_import_of_their_own() -> None:
    import lightning as L

    assert L.pytorch.callbacks.early_stopping.EarlyStopping is hasten.callbacks.EarlyStopping
    assert sys.modules["lightning.pytorch.callbacks.early_stopping"] is L.pytorch.callbacks.early_stopping
    assert "callbacks" in dir(L.pytorch)
    assert "early_stopping" in dir(L.pytorch.callbacks)
    assert "callbacks.early_stopping" not in dir(L.pytorch)


def test_a_star_import_brings_the_public_names() -> None:
    space: dict[str, Any] = {}
    exec("from lightning.pytorch.trainer.states import *", space)
    assert sorted(name for name in space if name[0] != "_") == [
        "RunningStage", "TrainerFn", "TrainerState", "TrainerStatus",
    ]  # fmt: skip
    assert importlib.import_module("lightning.pytorch.loops").__all__ == []


def test_objects_are_instances_of_the_field_s_classes() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers.logger import Logger

    assert isinstance(BoringModel(), pl.LightningModule)
    assert isinstance(hasten.loggers.CSVLogger("x"), Logger)
    assert pickle.loads(pickle.dumps(pl.Trainer)) is pl.Trainer


MISSING = {
    "from lightning.pytorch.callbacks import EarlyStoping": "callbacks.EarlyStoping. Did you mean 'EarlyStopping'?",
    "from lightning.pytorch import Nothing_like_it": "Nothing_like_it. See docs/compat.md",
    "import lightning.pytorch.metrics": "pytorch.metrics. Use the package torchmetrics",
    "import pytorch_lightning.metrics.functional": "pytorch_lightning.metrics. Use the package torchmetrics.",
    "import lightning.app": "lightning.app. It belongs to a hosted product.",
    "import lightning.pytorch.callbackz": "pytorch.callbackz. Did you mean 'callbacks'?",
}


@pytest.mark.parametrize(("line", "says"), MISSING.items())
def test_what_is_missing_is_an_import_error_that_names_the_alternative(line: str, says: str) -> None:
    with refused(ModuleNotFoundError, says=says):
        exec(line)


def test_a_missing_attribute_is_an_attribute_error() -> None:
    import lightning.pytorch as pl

    with refused(AttributeError, says=("lightning.pytorch.Trainr", "'Trainer'")):
        pl.Trainr
    assert not hasattr(pl, "__wrapped__")
    with refused(AttributeError, says=("'lightning.pytorch'", "'__wrapped__'")):
        pl.__wrapped__


def test_asking_whether_a_module_is_there_raises_nothing() -> None:
    assert importlib.util.find_spec("lightning.app") is None
    assert importlib.util.find_spec("lightning.pytorch.nothing") is None
    found = importlib.util.find_spec("lightning.pytorch.callbacks")
    assert found is not None
    assert found.name == "lightning.pytorch.callbacks"


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning", "pytorch_lightning", "Lightning.Fabric"])
def test_packages_are_told_a_version(name: str) -> None:
    import lightning
    from lightning_utilities.core.imports import RequirementCache

    version = importlib.metadata.version(name)
    assert re.fullmatch(r"2\.6\.\d+", version)
    assert version == lightning.__version__ == lightning.pytorch.__version__
    assert RequirementCache(f"{name}>=2.0,<2.7")
    distribution = importlib.metadata.distribution(name)
    assert distribution.metadata["Name"] in ("lightning", "pytorch-lightning", "lightning-fabric")
    top_level = (distribution.read_text("top_level.txt") or "").strip()
    assert top_level == distribution.metadata["Name"].replace("-", "_")
    assert distribution.files is None
    with refused(FileNotFoundError, says="lightning"):
        distribution.locate_file("x")


def test_other_packages_keep_their_versions() -> None:
    import torchmetrics

    assert importlib.metadata.version("torchmetrics") == torchmetrics.__version__
    listed = [found.metadata["Name"] for found in importlib.metadata.distributions()]
    assert {"lightning", "pytorch-lightning", "torchmetrics"} <= {name for name in listed if name}


def test_lightning_utilities_knows_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_info as shared_info
    from lightning_utilities.core.rank_zero import rank_zero_only as shared

    assert shared is rank_zero_only
    shared_info("said without an error about a rank that was never set")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert shared(lambda: "first", default="other")() == "other"


def test_uninstall_leaves_nothing() -> None:
    import lightning
    import lightning_utilities.core.rank_zero as shared

    assert isinstance(lightning, AliasModule)
    assert hasten_lightning.installed()
    hasten_lightning.install()  # Again: nothing happens.
    hasten_lightning.uninstall()
    assert not hasten_lightning.installed()
    assert not [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]
    assert shared.rank_zero_only is not hasten.utilities.rank_zero_only
    hasten_lightning.uninstall()  # Again: nothing happens.
    with pytest.raises(ModuleNotFoundError):
        importlib.metadata.version("lightning")


def test_install_after_lightning_was_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten_lightning.uninstall()
    module = type(sys)("lightning.pytorch")
    module.__file__ = "/somewhere/lightning/pytorch/__init__.py"
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    message = r"install\(\): lightning\.pytorch was imported already from /somewhere/.*hasten run PROGRAM"
    with pytest.raises(RuntimeError, match=message):
        hasten_lightning.install()
    assert not hasten_lightning.installed()


@pytest.mark.parametrize(
    ("home", "name", "base", "says"),
    [
        ("strategies", "DataParallelStrategy", "ParallelStrategy", "Write strategy='ddp'"),
        ("accelerators", "HPUAccelerator", "Accelerator", r"Write Trainer\(accelerator='auto'\)"),
        ("accelerators", "TPUAccelerator", "Accelerator", r"Its name is XLAAccelerator now"),
        ("loggers", "LitLogger", "Logger", "It belongs to a hosted product. There are CSVLogger"),
    ],
)
def test_classes_that_are_not_here_can_be_named_but_not_made(home: str, name: str, base: str, says: str) -> None:
    module = importlib.import_module(f"hasten.{home}")
    kind = getattr(module, name)
    assert kind.__name__ == name
    assert kind.__module__ == f"hasten.{home}"
    assert issubclass(kind, getattr(module, base))
    assert not isinstance(object(), kind)
    own = type("Own", (kind,), {})
    for each in (kind, own):
        with pytest.raises(ValueError, match=rf"^{name} is (not in (this version of )?hasten|discontinued)\. .*{says}"):
            each(1, option=2)


def test_checkpoints_may_hold_objects_under_the_alias_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten._lib import rank_zero
    from hasten.checkpoint import files

    monkeypatch.setattr(rank_zero, "_warned", {})
    path = tmp_path / "a.ckpt"
    contents = {"extra": [1, Fraction(1, 2)]}
    with warned(UserWarning, says=("checkpoint['extra'][1]", "weights_only=False")):
        files.save(contents, path)
    assert files.load(path, weights_only=False) == contents
    with pytest.raises(RuntimeError):
        files.load(path)
    hasten_lightning.uninstall()
    with refused(TypeError, says="checkpoint['extra'][1] is a Fraction"):
        files.save(contents, path)


class Scale:
    """An object no checkpoint holds as plain data."""

    def __init__(self, by: int = 1) -> None:
        self.by = by


class Scaled(hasten.demos.BoringModel):
    """A model whose hyper-parameter is an object."""

    def __init__(self, scale: Any = None, odd: Any = None, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale


def test_objects_among_hyper_parameters_come_back_for_files_that_are_trusted(tmp_path: Path) -> None:
    model = Scaled(Scale(3), lambda: 1, width=5)  # A lambda cannot be stored at all.
    trainer = quiet(fast_dev_run=True)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trusted = Scaled.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert (trusted.scale.by, trusted.hparams.width, trusted.hparams.odd) == (3, 5, None)
    # Read without trust, no code runs; a run needs no hyper-parameters.
    with refused(CheckpointRefused, says=("['scale']", "add_safe_globals([Scale])")):
        Scaled.load_from_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(model, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    with torch.serialization.safe_globals([Scale]):
        assert Scaled.load_from_checkpoint(tmp_path / "a.ckpt").scale.by == 3
    given = Scaled.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False, scale=Scale(4))
    assert given.scale.by == 4
