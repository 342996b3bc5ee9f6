"""Programs in the forms that articles use: evaluation before the fit, Trainers in branches, paths of runs, hooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten_tools.eject import EjectError
from tests.eject.running import check_form, eject, fits, same
from tests.refusals import refused

PROGRAM = """import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
{hooks}

class Reads(L.Callback):
    def __init__(self):
        self.seen = []

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append(float(trainer.callback_metrics["val_loss"]))


x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
rows = TensorDataset(x, x[:, :3].argmax(1))
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true")
    args = parser.parse_args()
    L.seed_everything(3, verbose=False)
    model, train, val = Net(), DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=20)
{train}
"""
BEFORE = """    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False)
    before = trainer.validate(model, val)[0]["val_loss"]
    trainer.fit(model, train, val)
    seen = [before]
"""
BRANCHES = """    best, reads = ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=2), Reads()
    callbacks = [best, reads]
    if args.fast:
        trainer = L.Trainer(max_epochs=1, limit_train_batches=2, callbacks=callbacks, accelerator="cpu", logger=False)
    else:
        trainer = L.Trainer(max_epochs=2, callbacks=callbacks, accelerator="cpu", logger=False)
    trainer.fit(model, train, val)
    seen = [*reads.seen, *(float(score) for score in best.best_k_models.values())]
"""
README = """    trainer = L.Trainer(limit_train_batches=3, max_epochs=1, accelerator="cpu")
    trainer.fit(model, train, val)
    weights = torch.load("./lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt", weights_only=False)["state_dict"]
    seen = [float(one.double().sum()) for one in weights.values()]
"""
RESUMED = """    trainer = L.Trainer(max_epochs=1, log_every_n_steps=2, accelerator="cpu", logger=False)
    trainer.fit(model, train, val)
    trainer.save_checkpoint("one.ckpt")
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False)
    trainer.fit(model, train, val, ckpt_path="one.ckpt")
    seen = [model.again]
"""
HOOKS = """
    again = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["extra"] = 3

    def on_load_checkpoint(self, checkpoint):
        self.again = checkpoint["extra"]
"""


@pytest.mark.parametrize(
    ("train", "hooks", "arguments"),
    [(BEFORE, "", []), (BRANCHES, "", []), (BRANCHES, "", ["--fast"]), (README, "", []), (RESUMED, HOOKS, [])],
)
def test_the_ejected_program_trains_and_sees_the_same(
    train: str, hooks: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PROGRAM.format(train=train + "    told.append(seen)\n", hooks=hooks)
    found = []
    for name in ("own", "plain"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        program, told = text, []
        if name == "plain":
            program = eject(text, folder / "program.py", arguments)
            check_form(program, 400)
        found.append((fits(program, arguments, plain=name == "plain", state={"told": told}), told))
    (own, seen), (plain, seen_too) = found
    assert own
    assert same(own, plain)
    assert seen
    assert seen == seen_too


def test_the_other_branch_ends_the_ejected_program_with_a_message(tmp_path: Path) -> None:
    text = PROGRAM.format(train=BRANCHES, hooks="")
    plain = eject(text, tmp_path / "program.py")
    assert "max_epochs=1" not in plain
    with pytest.raises(SystemExit, match=r"program\.py was ejected with arguments that take the other branch"):
        fits(plain, ["--fast"], plain=True)


def test_an_evaluation_before_a_fit_that_prepares_the_model_is_refused(tmp_path: Path) -> None:
    text = PROGRAM.format(train=BEFORE, hooks="\n    def setup(self, stage):\n        pass\n")
    with refused(EjectError, says=("Trainer.validate", "Trainer.fit")):
        eject(text, tmp_path / "program.py")
