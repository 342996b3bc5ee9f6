"""Entries of a checkpoint that make no sense are refused by name, before anything is restored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.checkpoint import files
from tests.callbacks.resuming import SaveAt
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    callbacks = [SaveAt(path, 3), L.callbacks.EarlyStopping("train_loss")]
    quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=callbacks).fit(Scheduled(), loader(20))
    return files.load(path)


def put(*path: Any) -> Callable[[Any], None]:
    """Return a change: the last of ``path`` takes the place of what is at the others."""
    *keys, last, value = path

    def change(checkpoint: Any) -> None:
        for key in keys:
            checkpoint = checkpoint[key]
        checkpoint[last] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    *keys, last = path

    def change(checkpoint: Any) -> None:
        for key in keys:
            checkpoint = checkpoint[key]
        del checkpoint[last]

    return change


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (put("state_dict", None), "'state_dict' is None, and must be a dict"),
    (put("state_dict", {1: torch.ones(1)}), r"'state_dict\[1\]' is 1, and must be named by a str"),
    (put("global_step", -3), "'global_step' is -3, and must be a whole number of at least 0"),
    (put("epoch", True), "'epoch' is True"),
    (put("loops", [1, 2]), "'loops' is a list"),
    (drop("loops", "fit", "window"), "'loops.fit.window' is missing"),
    (put("loops", "fit", "last_batch", "no"), "'loops.fit.last_batch' is 'no', and must be True or False"),
    (put("callbacks", {"EarlyStopping": [1]}), r"callbacks\['EarlyStopping'\].* is a list"),
    (put("optimizer_states", {}), "'optimizer_states' is a dict, and must be a list"),
    (put("optimizer_states", 0, None), r"'optimizer_states\[0\]' is None"),
    (drop("optimizer_states", 0, "param_groups", 0, "params"), r"param_groups\[0\].params' is missing"),
    (drop("lr_schedulers"), "'lr_schedulers' is missing"),
    (put("hasten", "ranks", []), "'hasten.ranks' is a list, and must be a list that is not empty"),
    (put("hasten", "ranks", 0, "data", 4), r"'hasten.ranks\[0\].data' is 4"),
    (drop("hasten", "ranks", 0, "values", "train"), r"'hasten.ranks\[0\].values.train' is missing"),
    (put("hasten", "gradients", {"ranks": [{}]}), r"'hasten.gradients.ranks\[0\].optimizers' is missing"),
    (put("hyper_parameters", [1]), "'hyper_parameters' is a list"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_nothing_is_restored(
    tmp_path: Path, whole: dict[str, Any], change: Callable[[Any], None], message: str
) -> None:
    checkpoint, path = copy.deepcopy(whole), tmp_path / "bad.ckpt"
    change(checkpoint)
    files.save(checkpoint, path)
    module, callback = Scheduled(), L.callbacks.EarlyStopping("train_loss")
    before = copy.deepcopy(module), callback.state_dict()
    with pytest.raises(ValueError, match=rf"(?s)bad\.ckpt.*{message}"):
        quiet(max_epochs=2, callbacks=[callback]).fit(module, loader(20), ckpt_path=path)
    assert same_weights(module, before[0])
    assert callback.state_dict() == before[1]


def test_a_run_of_version_0_1_goes_on(tmp_path: Path, whole: dict[str, Any]) -> None:
    older = copy.deepcopy(whole)
    drop("hasten", "ranks", 0, "metrics")(older)
    ended = []
    for name, checkpoint in {"now.ckpt": whole, "0.1.ckpt": older}.items():
        files.save(checkpoint, tmp_path / name)
        module = Scheduled()
        quiet(max_epochs=2).fit(module, loader(20), ckpt_path=tmp_path / name)
        ended.append(module)
    assert same_weights(*ended)


def test_a_hook_may_put_an_entry_right(tmp_path: Path, whole: dict[str, Any]) -> None:
    class Mending(L.Callback):
        mends = True

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            if self.mends:
                checkpoint["lr_schedulers"] = whole["lr_schedulers"]

    path, mending = tmp_path / "bad.ckpt", Mending()
    files.save({**whole, "lr_schedulers": None}, path)
    trainer = quiet(max_epochs=2, callbacks=[mending])
    trainer.fit(Scheduled(), loader(20), ckpt_path=path)
    assert trainer.current_epoch == 2
    mending.mends, module = False, Scheduled()
    before = copy.deepcopy(module)
    with refused(ValueError, says=("bad.ckpt", "'lr_schedulers'")):
        quiet(max_epochs=2, callbacks=[mending]).fit(module, loader(20), ckpt_path=path)
    assert same_weights(module, before)


class OfTheProgram(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"best": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["beste"]


def test_an_error_of_the_programs_own_callback_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    quiet(max_epochs=1, callbacks=[OfTheProgram(), SaveAt(path, 3)]).fit(Classifier(), loader(20))
    with pytest.raises(KeyError) as caught:
        quiet(max_epochs=2, callbacks=[OfTheProgram()]).fit(Classifier(), loader(20), ckpt_path=path)
    assert caught.value.args == ("beste",)
    assert caught.value.__notes__ == [f"{path} was being restored."]


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.ckpt")
    with refused(ValueError, says="list.ckpt"):
        quiet().fit(Classifier(), loader(8), ckpt_path=tmp_path / "list.ckpt")


def test_what_only_training_needs_is_not_asked_for_elsewhere(tmp_path: Path, whole: dict[str, Any]) -> None:
    path = tmp_path / "a.ckpt"
    files.save({**whole, "optimizer_states": None, "loops": 3}, path)
    quiet().test(Scheduled(), loader(8), ckpt_path=path, verbose=False)
    Scheduled.load_from_checkpoint(path)
    files.save({**whole, "state_dict": None}, path)
    for call in (
        lambda: quiet().test(Scheduled(), loader(8), ckpt_path=path, verbose=False),
        lambda: Scheduled.load_from_checkpoint(path),
    ):
        with refused(ValueError, says=("a.ckpt", "'state_dict'")):
            call()


def test_counters_of_lightnings_that_make_no_sense_are_refused(tmp_path: Path, whole: dict[str, Any]) -> None:
    theirs = {key: value for key, value in whole.items() if key not in ("hasten", "hasten_version")}
    path = tmp_path / "theirs.ckpt"
    module = Scheduled()
    before = copy.deepcopy(module)
    for loop, message in (
        ({"epoch_loop.batch_progress": 3}, "'loops.fit_loop.epoch_loop.batch_progress' is 3"),
        ({"epoch_loop.batch_progress": {"current": {"processed": "x"}}}, "current.processed' is 'x'"),
        ({"epoch_progress": 4, "epoch_loop.batch_progress": _progress()}, "'loops.fit_loop' make no sense"),
    ):
        files.save({**theirs, "loops": {"fit_loop": loop}}, path)
        with pytest.raises(ValueError, match=message):
            quiet().fit(module, loader(20), ckpt_path=path)
    assert same_weights(module, before)


def _progress() -> dict[str, Any]:
    counts = {"ready": 1, "started": 1, "processed": 1, "completed": 1}
    return {"total": counts, "current": dict(counts), "is_last_batch": False}


def documented(title: str) -> tuple[set[str], set[str]]:
    """Return the entries that a table of ``docs/checkpoints.md`` lists, and those that are always there."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- {title} -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    names = [(set(re.findall(r"`([^`]+)`", entry)), when == "always") for entry, when, _ in rows]
    return set().union(*(each for each, _ in names)), set().union(*(each for each, always in names if always))


def test_the_documentation_lists_the_entries_of_a_checkpoint(tmp_path: Path) -> None:
    class Data(L.LightningDataModule):
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"position": 1}

    class Saved(Scheduled):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    for datamodule in (None, Data()):
        model = Scheduled() if datamodule is None else Saved()
        trainer = quiet(max_epochs=1)
        trainer.fit(model, loader() if datamodule is None else None, datamodule=datamodule)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
        assert checkpoint.pop(Data.__qualname__, None) == (None if datamodule is None else {"position": 1})
        (of_process,) = checkpoint["hasten"]["ranks"]
        for title, entries in (
            ("entries of a checkpoint", checkpoint),
            ('entries of "hasten"', checkpoint["hasten"]),
            ("entries of a process", of_process),
        ):
            everything, always = documented(title)
            assert always <= set(entries) <= everything, title
