"""What the core finds by entry points: the commands and methods of hasten's own tools, and what others add."""

from __future__ import annotations

import importlib
import pickle
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import hasten as L
from hasten.extend import GROUPS, Command, found, load, moved
from hasten.machine.devices import added_accelerators
from tests.programs import fork_python
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, module: str) -> None:
    """Install a package ``extra`` with these entry points into a folder of the path, as pip would."""
    info = folder / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    (folder / "extra.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "extra", raising=False)  # That of another test.


@pytest.mark.parametrize("group", DECLARED)
def test_every_entry_point_is_installed_and_can_be_loaded(group: str) -> None:
    assert group in GROUPS
    assert DECLARED[group].keys() <= found(group).keys(), "install hasten again: the entry points are in its metadata"
    for name in DECLARED[group]:
        assert load(group, name, purpose="a test") is not None


def test_the_files_beside_the_packages_name_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that is not installed has all of hasten's tools."""
    monkeypatch.setattr("hasten.extend.entry_points.entry_points", lambda **given: entry_points(group="no.such.group"))
    for group, names in DECLARED.items():
        assert {name: entry.value for name, entry in found(group).items()} == names


def test_a_command_of_another_package_is_one_of_hasten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.commands import commands, main

    entries = "[hasten.commands]\nhello = extra:hello\nadvise = extra:hello\n"
    install(tmp_path, monkeypatch, entries, "from hasten.extend import Command\nhello = Command('extra', 'say hello')\n"
            "def main(arguments):\n    return len(arguments)\n")  # fmt: skip
    assert commands()["hello"] == Command("extra", "say hello")
    assert commands()["advise"].module != "extra", "hasten's own commands cannot be replaced"
    assert main(["hello", "one", "two"]) == 2


def test_an_accelerator_of_another_package_brings_its_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = "[hasten.accelerators]\ntoy = extra:Toy\n[hasten.strategies]\nfor_toy = extra:ForToy\n"
    install(tmp_path, monkeypatch, entries, TOY)
    added_accelerators.cache_clear()
    try:
        assert type(L.Trainer(accelerator="toy", logger=False).strategy).__name__ == "ForToy"
        by_strategy = L.Trainer(strategy="for_toy", logger=False)
        assert (type(by_strategy.accelerator).__name__, by_strategy.precision) == ("Toy", "32-true")
        with refused(ValueError, "strategy", fix="TOYs"):
            L.Trainer(accelerator="toy", strategy="ddp", logger=False)
        with refused(ValueError, "accelerator", fix="'toy'"):
            L.Trainer(accelerator="toi", logger=False)
        with refused(ValueError, says="Trainer(precision='64-true')"):
            L.Trainer(accelerator="toy", precision="64-true", logger=False)
    finally:
        added_accelerators.cache_clear()


TOY = """
from hasten.accelerators import CPUAccelerator
from hasten.strategies import SingleDeviceStrategy


class Toy(CPUAccelerator):
    strategies = ("for_toy",)
    name = staticmethod(lambda: "toy")
    device_type = classmethod(lambda cls: "cpu")

    def precision_of(self, name):
        if name == "64-true":
            raise ValueError("precision='64-true': a toy has none.")


class ForToy(SingleDeviceStrategy):
    name = "for_toy"
"""


def test_a_missing_tool_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.extend.entry_points.found", lambda group: {})
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with refused(ModuleNotFoundError, says=("Trainer.check", "'check'")):
        trainer.check(L.LightningModule())


def test_a_fit_asks_for_no_entry_point() -> None:
    program = (
        "import sys, hasten\n"
        "from hasten.demos.boring_classes import BoringModel\n"
        "hasten.Trainer(max_steps=2, accelerator='cpu', logger=False, enable_checkpointing=False).fit(BoringModel())\n"
        "assert 'importlib.metadata' not in sys.modules or 'hasten_tools.speed' not in sys.modules\n"
    )
    assert fork_python("-c", program).returncode == 0


@pytest.mark.parametrize("old", sorted(moved.MOVED))
def test_a_module_that_moved_is_there_under_its_old_name(old: str) -> None:
    assert importlib.import_module(old).__doc__ == importlib.import_module(moved.MOVED[old]).__doc__


def test_old_and_new_name_are_one_module() -> None:
    old = importlib.import_module("hasten.speed.levers")
    new = importlib.import_module("hasten_tools.speed.levers")
    assert old is new
    assert new.__spec__ is not None
    assert new.__spec__.name == "hasten_tools.speed.levers"
    # As in a pickle of the time when the class was there.
    named = b"chasten.speed.safety\nSafety\n."
    assert pickle.loads(named) is importlib.import_module("hasten_tools.speed.safety").Safety
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hasten.speed.nothing")


def test_imports_that_name_hasten_where_they_named_lightning_work() -> None:
    program = (
        "import hasten.pytorch as pl\n"
        "import hasten as L\n"
        "from hasten.fabric.strategies import DDPStrategy\n"
        "from hasten.pytorch.callbacks import ModelCheckpoint\n"
        "from hasten.pytorch.callbacks.early_stopping import EarlyStopping\n"
        "from hasten.pytorch.utilities.rank_zero import rank_zero_only\n"
        "from hasten.pytorch.callbacks.progress.rich_progress import RichProgressBar, RichProgressBarTheme\n"
        "from hasten.callbacks.progress.tqdm_progress import TQDMProgressBar\n"
        "from hasten.callbacks.progress.rich_progress import RichProgressBarTheme as Theme\n"
        "from hasten.callbacks.progress.progress_bar import ProgressBar\n"
        "assert pl.Trainer is L.Trainer and L.pytorch.callbacks.ModelCheckpoint is L.callbacks.ModelCheckpoint\n"
        "assert (ModelCheckpoint, EarlyStopping) == (L.callbacks.ModelCheckpoint, L.callbacks.EarlyStopping)\n"
        "assert (RichProgressBar, TQDMProgressBar) == (L.callbacks.RichProgressBar, L.callbacks.TQDMProgressBar)\n"
        "assert ProgressBar is L.callbacks.ProgressBar and RichProgressBarTheme is Theme\n"
        "assert DDPStrategy is L.strategies.DDPStrategy and rank_zero_only is L.utilities.rank_zero_only\n"
    )
    result = fork_python("-c", program)
    assert result.returncode == 0, result.stderr


def test_a_module_that_only_lightning_has_is_answered_with_the_package_to_import_from() -> None:
    with refused(ModuleNotFoundError, fix="hasten.callbacks", says="hasten.pytorch.callbacks.lr_monitor"):
        importlib.import_module("hasten.pytorch.callbacks.lr_monitor")
    with refused(ModuleNotFoundError, fix="from hasten import seed_everything", says="hasten.pytorch.utilities.seed"):
        importlib.import_module("hasten.pytorch.utilities.seed")
    result = fork_python("-c", "from hasten.utilities import seed_everithing")
    assert "ImportError: cannot import name 'seed_everithing' from 'hasten.utilities'" in result.stderr


def test_type_checkers_find_public_modules_that_moved_under_their_old_names() -> None:
    core = ROOT / "src" / "hasten"
    stubs = {
        ".".join(("hasten", *path.relative_to(core).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in core.rglob("*.pyi")
    }
    for old, path in stubs.items():
        assert path.read_text(encoding="utf-8") == f"from {moved.new_name(old)} import *\n"
    for package in ("demos", "utilities"):
        modules = {path.stem for path in (ROOT / "src" / "hasten_lightning" / package).glob("*.py")}
        assert {path.stem for path in (core / package).glob("*.pyi")} == modules
        public = importlib.import_module(f"hasten.{package}")
        assert set(public.__all__) <= set(dir(public))


@pytest.mark.parametrize(
    ("package", "old", "name"),
    [
        ("hasten.strategies", "hasten.strategies.deepspeed", "DeepSpeedStrategy"),
        ("hasten.strategies", "hasten.strategies.xla", "XLAStrategy"),
        ("hasten.precision", "hasten.precision.xla", "XLAPrecision"),
        ("hasten.plugins", "hasten.checkpoint.xla", "XLACheckpointIO"),
        ("hasten.accelerators", "hasten.xla.devices", "XLAAccelerator"),
        ("hasten.profilers", "hasten.profilers.xla", "XLAProfiler"),
    ],
)
def test_public_names_of_engines_stay_in_the_packages_of_the_core(package: str, old: str, name: str) -> None:
    public = getattr(importlib.import_module(package), name)
    assert public is getattr(importlib.import_module(old), name)
    assert name in importlib.import_module(package).__all__


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("from hasten.pytorch.callbacks import ModelCheckpont", "from hasten.callbacks import ModelCheckpoint"),
        (
            "from hasten.pytorch.callbacks.model_checkpoint import ModelCheckpoint",
            "from hasten.callbacks import ModelCheckpoint",
        ),
        ("from hasten.callbacks.progress import RichProgressBar", "from hasten.callbacks import RichProgressBar"),
        ("from hasten.pytorch import Traner", "from hasten import Trainer"),
        ("from hasten.pytorch.core import LightningModule", "from hasten import LightningModule"),
    ],
)
def test_what_lightning_has_elsewhere_is_answered_with_the_import_to_write(line: str, instead: str) -> None:
    with refused(ModuleNotFoundError, fix=instead):
        exec(line)
