"""Programs that read what their run has written: loggers and callbacks in variables, history, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten_tools.eject import EjectError
from tests.eject.running import check_form, eject, fits, same
from tests.refusals import refused

ARTICLE = """import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from hasten.loggers import CSVLogger


class Bar(TQDMProgressBar):
    def get_metrics(self, trainer, pl_module):
        return {}


class Net(L.LightningModule):
    def __init__(self, width, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(L.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        self.rows = TensorDataset(x, x[:, :3].argmax(1))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=20)


def main(options):
    L.seed_everything(options.seed)
    best = ModelCheckpoint(monitor="val_loss", filename="best-{epoch:02d}-{val_loss:.3f}", save_last=True)
    stopping, timer = EarlyStopping("val_loss", patience=2), None
    timer = Timer()
    callbacks = [best, stopping, Bar()]
    callbacks.append(timer)
    logger = CSVLogger(save_dir="logs/", name="my-model", flush_logs_every_n_steps=1)
    trainer = L.Trainer(
        max_epochs=3, callbacks=callbacks, logger=logger, accelerator="auto", devices="auto", log_every_n_steps=2,
    )
    model = Net(width=4)
    trainer.fit(model, datamodule=Data())
    files.append(open(f"{trainer.logger.log_dir}/metrics.csv").read())
    state = torch.load(best.best_model_path)
    found.update({name: value.sum().item() for name, value in state["state_dict"].items()})
    model = Net.load_from_checkpoint(best.best_model_path)
    found.update(
        width=model.hparams.width, weights=sum(p.sum().item() for p in model.parameters()), folder=logger.log_dir,
        name=best.best_model_path, last=best.last_model_path, score=best.best_model_score.item(),
        stopped=stopping.stopped_epoch, is_best=trainer.checkpoint_callback is best, root=trainer.log_dir,
        history=trainer.history["val_loss"].values, steps=trainer.history["train_loss"].steps,
        keys=sorted(trainer.history.keys()), rows=len(trainer.history),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
"""


def test_the_plain_program_writes_and_reads_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = [{}, {}]
    files: list[list[str]] = [[], []]
    plain, weights = eject(ARTICLE, tmp_path / "program.py"), []
    check_form(plain, 390)
    for place, text in enumerate((ARTICLE, plain)):
        folder = tmp_path / str(place)
        folder.mkdir()
        monkeypatch.chdir(folder)
        state = {"found": found[place], "files": files[place]}
        weights.append(fits(text, plain=place == 1, state=state))
    assert same(*weights)
    own, other = found
    assert own.pop("history") == pytest.approx(other.pop("history"))
    assert own == other
    table, plain_table = ([line.split(",") for line in text[0].splitlines()] for text in files)
    assert len(table) == len(plain_table) > 6
    for row, plain_row in zip(table, plain_table, strict=True):
        numbers = [float(cell) if cell.replace(".", "").isdigit() else cell for cell in row]
        assert numbers == pytest.approx([float(c) if c.replace(".", "").isdigit() else c for c in plain_row])


def test_no_line_of_what_goes_stays(tmp_path: Path) -> None:
    plain = eject(ARTICLE, tmp_path / "program.py").split("# -- the program")[1]
    assert not re.search(r"\bBar\b|Timer|flush_logs", plain)
    assert "callbacks = [best, stopping]" in plain


SHORT = "trainer.fit(model, datamodule=Data())"
REFUSED = {
    "timer.time_elapsed: the ejected program has no Timer": "print(timer.time_elapsed())",
    "trainer.history.plot: the ejected history": "trainer.history.plot()",
    "logger.save: the ejected CSVLogger has log_dir": "logger.save()",
    "best.kth_best_model_path: the ejected ModelCheckpoint has best_k_models": "print(best.kth_best_model_path)",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_there_afterwards_is_refused_with_its_line(why: str, tmp_path: Path) -> None:
    text = ARTICLE.replace(SHORT, f"{SHORT}\n    {REFUSED[why]}")
    line = text[: text.index(REFUSED[why])].count("\n") + 1
    with refused(EjectError, says=f"line {line}: {why}"):
        eject(text, tmp_path / "program.py")


def test_loggers_that_are_only_passed_are_left_out(tmp_path: Path) -> None:
    text = (
        ARTICLE.replace("trainer.logger.log_dir", "'.'").replace("trainer.log_dir", "1").replace("logger.log_dir", "2")
    )
    text = text.replace('CSVLogger(save_dir="logs/", name="my-model", flush_logs_every_n_steps=1)', "WandbLogger()")
    plain = eject(text.replace("import CSVLogger", "import WandbLogger"), tmp_path / "program.py")
    assert "# logger=WandbLogger left out: values go to metrics.jsonl." in plain
    assert not re.search(r"WandbLogger\(|logger = |logger=logger", plain)
