"""Each feature of the Trainer, ejected: the same weights, and no lines for features that are off."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.eject.running import check_form, eject, fits, same

PROGRAM = '''"""A program of the tests."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L, math as m
from hasten.callbacks import {imports}


class Net(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)
{steps}
    def configure_optimizers(self):
        optimizer = {optimizer}
        {configure}
{methods}

{extra}
def loader(count: int, shuffle: bool) -> DataLoader:
    x = torch.randn(m.trunc(count), 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


if __name__ == "__main__":
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_model_summary=False, enable_checkpointing={checkpoints}, {arguments}
    )
    {fit}
'''
STEPS = """
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)
"""


@dataclass
class Case:
    arguments: str = "max_epochs=2"
    steps: str = STEPS
    optimizer: str = "torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)"
    configure: str = "return optimizer"
    methods: str = ""
    extra: str = ""
    imports: str = "EarlyStopping"
    fit: str = "trainer.fit(Net(), loader(26, shuffle=True), loader(10, shuffle=False))"
    checkpoints: bool = False
    lines: int = 200
    # What the ejected program has, and what it has not.
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = field(default=("accumulate", "clip_grad", "autocast", "scheduler", "EarlyStopping"))

    def text(self) -> str:
        parts = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("has", "lacks", "lines")
        }
        return PROGRAM.format(**parts)


def scheduled(what: str, options: str = "") -> str:
    return (
        f'return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": torch.optim.lr_scheduler.{what}{options}}}}}'
    )


# For the first batch of a window, the last one, and all of one.
SOME = STEPS.replace("return self.loss(batch)", "return self.loss(batch) if batch_idx not in (0, 3, 4, 5) else None", 1)
FALLS_THROUGH = STEPS.replace(
    "return self.loss(batch)", "if batch_idx not in (0, 3, 4, 5):\n            return self.loss(batch)", 1
)

CASES = {
    "plain": Case(),
    "accumulation with a tail": Case(
        "max_epochs=2, accumulate_grad_batches=3", has=("window",), lacks=("clip_grad", "scheduler")
    ),
    "clipping by norm": Case("max_epochs=2, gradient_clip_val=0.1", has=("clip_grad_norm_",), lacks=("accumulate",)),
    "clipping by value": Case(
        'max_epochs=2, gradient_clip_val=0.01, gradient_clip_algorithm="value"',
        has=("clip_grad_value_",),
        lacks=("clip_grad_norm_",),
    ),
    "accumulation, clipping and a schedule by steps": Case(
        "max_epochs=2, gradient_clip_val=0.1, accumulate_grad_batches=2",
        configure=scheduled("StepLR(optimizer, 2, 0.5)", ', "interval": "step"'),
        has=("if is_last:",),
        lacks=(),
    ),
    "bf16-mixed": Case('max_epochs=2, precision="bf16-mixed"', has=("torch.autocast",), lacks=("GradScaler",)),
    "64-true": Case('max_epochs=2, precision="64-true"', has=("torch.float64",), lacks=("autocast",)),
    "a schedule by epochs": Case(
        configure=scheduled("ExponentialLR(optimizer, 0.5)"), has=("scheduler.step()",), lacks=("autocast",)
    ),
    "two lists": Case(
        configure="return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]",
        has=("scheduler.step()",),
        lacks=("autocast",),
    ),
    "every second epoch": Case(
        "max_epochs=4",
        configure=scheduled("StepLR(optimizer, 1, 0.5)", ', "frequency": 2'),
        has=("% 2 == 0",),
        lacks=("autocast",),
    ),
    "a monitored schedule": Case(
        "max_epochs=5",
        configure=scheduled("ReduceLROnPlateau(optimizer, patience=0)", ', "monitor": "val_loss"'),
        optimizer="torch.optim.SGD(self.parameters(), lr=2.0)",
        has=('scheduler.step(self.callback_metrics["val_loss"])',),
        lacks=("autocast",),
    ),
    "a one-cycle schedule": Case(
        configure=scheduled(
            "OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)", ', "interval": "step"'
        ),
        lacks=("autocast",),
    ),
    "validation within epochs": Case("max_epochs=2, val_check_interval=0.5", has=("val_every",)),
    "validation after every second batch": Case("max_epochs=2, val_check_interval=2", has=("val_every",)),
    "validation every second epoch": Case("max_epochs=4, check_val_every_n_epoch=2", has=("check_val_every",)),
    "few batches": Case(
        "max_epochs=2, limit_train_batches=3, limit_val_batches=1", has=("itertools.islice",), lacks=("autocast",)
    ),
    "a share of the batches": Case("max_epochs=2, limit_train_batches=0.5", has=("itertools.islice",)),
    "steps": Case("max_steps=9", has=("self.max_steps",), lacks=("max_epochs", "autocast")),
    "without validation": Case(fit="trainer.fit(Net(), loader(26, shuffle=True))", lacks=("validat", "autocast")),
    "early stopping": Case(
        'max_epochs=9, callbacks=[EarlyStopping("val_loss", patience=1)]',
        optimizer="torch.optim.SGD(self.parameters(), lr=3.0)",
        has=("class EarlyStopping",),
        lacks=("autocast",),
    ),
    "early stopping that a later value takes back": Case(
        'max_epochs=4, min_epochs=3, callbacks=[EarlyStopping("val_loss", patience=1)]',
        steps=STEPS.replace("self.loss(batch), prog_bar=True", "float((1, 2, 0.5, 0.4)[self.current_epoch])"),
        has=("self.has_asked",),
        lacks=("autocast",),
    ),
    "LBFGS": Case(
        optimizer="torch.optim.LBFGS(self.parameters(), max_iter=3)", has=("def closure():",), lacks=("autocast",)
    ),
}


MANUAL = """
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5)
        first.step()
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        second.step()
        self.untoggle_optimizer(second)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
"""
MANUAL = MANUAL.replace("self.trainer.is_last_batch", "self.global_step % 4 == 0")
HOOKS = """
    def on_train_start(self):
        self.scale = 1.0

    def on_train_epoch_start(self):
        self.scale = 1.0 / (1 + self.current_epoch)

    def on_train_batch_start(self, batch, batch_idx):
        return None

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.mul_(self.scale)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", outputs["loss"])

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def on_validation_epoch_end(self):
        self.log("twice", 2.0 * len(self.trainer.callback_metrics))
"""
OPTIMIZER_STEP = """
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + self.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
"""
DICTS = """
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "size": len(batch[0])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["size"] and not outputs["loss"].requires_grad
"""
SKIPS = """
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        return self.loss(batch)
"""
DATA = """class Data(L.LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        noise = torch.randn(self.size, 6)
        self.parts = torch.utils.data.random_split(TensorDataset(noise, noise[:, :3].argmax(1)), [0.7, 0.3])

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=4)

    def test_dataloader(self):
        return self.val_dataloader()


"""
CALLBACK = """class Shrink(L.Callback):
    def __init__(self, by: float) -> None:
        self.by = by

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(self.by)
        trainer.should_stop = trainer.current_epoch == 2


"""
OWN_DATA = """
    def train_dataloader(self):
        return loader(26, shuffle=True)

    def val_dataloader(self):
        return loader(10, shuffle=False)
"""
RESUME = """trainer.fit(Net(), loader(26, shuffle=True), loader(10, shuffle=False))
    trainer.save_checkpoint("middle.ckpt")
    torch.manual_seed(1)
    second = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=4)
    second.fit(Net(), loader(26, shuffle=True), loader(10, shuffle=False), ckpt_path="middle.ckpt")"""
CASES |= {
    "manual optimization": Case(
        steps=MANUAL,
        methods="        self.automatic_optimization = False\n",
        optimizer="torch.optim.SGD(self.layers[0].parameters(), lr=0.1)",
        configure="second = torch.optim.Adam(self.layers[2].parameters())\n        "
        "self.automatic_optimization = False\n        "
        "return [optimizer, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.5)]",
        fit="trainer.fit(Net(), loader(26, shuffle=True))",
        lacks=("loss.backward()\n                ", "autocast"),
    ),
    "overridden hooks": Case(
        "max_epochs=3",
        steps=STEPS + HOOKS,
        configure=scheduled("ExponentialLR(optimizer, 0.5)"),
        has=("model.on_before_optimizer_step(optimizer)", "model.lr_scheduler_step(scheduler, None)"),
        lacks=("on_train_end", "on_fit_start"),
    ),
    "optimizer_step": Case(steps=STEPS + OPTIMIZER_STEP, has=("model.optimizer_step(",), lacks=("autocast",)),
    "optimizer_step and accumulation": Case(
        "max_epochs=2, accumulate_grad_batches=2", steps=STEPS + OPTIMIZER_STEP, lacks=("autocast",)
    ),
    "a dict": Case(steps=DICTS, has=('loss = outputs["loss"]',), lacks=("autocast",)),
    **{
        f"batches without a loss, {arguments}": Case(
            f"max_epochs=2, {arguments}",
            steps=SOME if "clip" in arguments else FALLS_THROUGH,
            configure=scheduled("StepLR(optimizer, 2, 0.5)", ', "interval": "step"'),
            has=("if loss is not None:",),
            lacks=("autocast",),
        )
        for arguments in (
            "accumulate_grad_batches=2",
            "accumulate_grad_batches=3, max_steps=3",
            "accumulate_grad_batches=2, gradient_clip_val=0.1",
            "max_steps=9",
        )
    },
    "a train() of its own": Case(
        methods="""
    def train(self, mode=True):
        super().train(mode)
        self.layers[1].eval()
        return self
""",
        has=("switch_back(modes)",),
        lacks=("autocast",),
    ),
    "stopped within an epoch and an accumulation": Case(
        "max_epochs=3, accumulate_grad_batches=3",
        steps=STEPS.replace(
            "return self.loss(batch)", "self.trainer.should_stop = batch_idx == 3\n        return self.loss(batch)", 1
        ),
        configure=scheduled("ExponentialLR(optimizer, 0.5)"),
        lacks=("autocast",),
    ),
    "a batch without a loss": Case(steps=SKIPS, has=("if loss is not None:",), lacks=("autocast",)),
    "a datamodule": Case(
        extra=DATA,
        fit="data = Data(30)\n    trainer.fit(Net(), datamodule=data)",
        has=('datamodule.setup("fit")',),
        lacks=("autocast",),
    ),
    "a datamodule by place": Case(
        extra=DATA, fit="trainer.fit(Net(), Data(30))", has=("datamodule.prepare_data()",), lacks=("autocast",)
    ),
    "loaders of the model": Case(
        steps=STEPS + OWN_DATA, fit="trainer.fit(Net())", has=("model.train_dataloader()",), lacks=("autocast",)
    ),
    "a callback of the program": Case(
        "max_epochs=9, callbacks=[Shrink(0.9)]", extra=CALLBACK, has=("callback.on_train_epoch_end",), lacks=()
    ),
    "a resumed run with an average": Case(
        "max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9)]",
        imports="EMAWeightAveraging",
        fit=RESUME.replace("max_epochs=4", "max_epochs=4, callbacks=[EMAWeightAveraging(decay=0.9)]"),
        has=("vars(callback).update(state)",),
        lines=230,
        lacks=(),
    ),
    "a resumed run": Case(fit=RESUME, has=("load_checkpoint",), lacks=("autocast",)),
    # The first start of such a program has no checkpoint; the second fit has that of the first.
    "a run that resumes from the last checkpoint": Case(
        "max_epochs=2, callbacks=[ModelCheckpoint(monitor='val_loss', save_last=True)]",
        imports="ModelCheckpoint",
        fit=RESUME.replace("shuffle=False))\n", "shuffle=False), ckpt_path='last')\n", 1)
        .replace(
            "enable_checkpointing=False, max_epochs=4",
            "max_epochs=4, callbacks=[ModelCheckpoint(save_last=True)]",
        )
        .replace('trainer.save_checkpoint("middle.ckpt")', "first = trainer.checkpoint_callback.last_model_path")
        .replace('"middle.ckpt"', '"last"'),
        checkpoints=True,
        lines=260,
        lacks=("autocast",),
    ),
    "averages": Case(
        "max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9)]",
        imports="EMAWeightAveraging",
        has=("class EMAWeightAveraging",),
        lacks=(),
    ),
    "accumulation that changes": Case(
        "max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})]",
        imports="GradientAccumulationScheduler",
        has=("is_last",),
        lacks=(),
    ),
    "the best checkpoint": Case(
        'max_epochs=3, callbacks=[ModelCheckpoint("kept", monitor="val_loss", save_last=True)]',
        imports="ModelCheckpoint",
        checkpoints=True,
        has=("class ModelCheckpoint",),
        lacks=("autocast",),
    ),
    "the last checkpoint": Case(checkpoints=True, has=('"last.ckpt"',), lacks=("class ModelCheckpoint",)),
}
CASES["manual optimization"].methods = ""
AVERAGED = """model = Net()
    trainer.fit(model, loader(26, shuffle=True), loader(10, shuffle=False))
    trainer.validate(model, loader(10, shuffle=False), ckpt_path="best", verbose=False)
    second = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=2,
        val_check_interval=2,
    )
    second.fit(model, loader(26, shuffle=True), loader(10, shuffle=False))"""
TWICE = """model = Net()
    trainer.fit(model, loader(26, shuffle=True), loader(10, shuffle=False))
    trainer.fit(model, loader(26, shuffle=True), loader(10, shuffle=False))"""
SWA = "StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)"
NORM = """    def configure_model(self):
        self.layers.insert(1, nn.BatchNorm1d(8))
"""
HALVES = """
    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def on_after_backward(self):
        self.layers[0].weight.grad.mul_(0.5)
"""
CASES |= {
    "the average of a checkpoint": Case(
        'max_epochs=3, val_check_interval=2, callbacks=[EMAWeightAveraging(decay=0.9), ModelCheckpoint("kept")]',
        imports="EMAWeightAveraging, ModelCheckpoint",
        checkpoints=True,
        fit=AVERAGED,
        lines=290,
        lacks=(),
    ),
    "averages, twice": Case(
        'max_epochs=6, callbacks=[EMAWeightAveraging(decay=0.9), EarlyStopping("val_loss", patience=1, mode="max")]',
        imports="EMAWeightAveraging, EarlyStopping",
        fit=TWICE,
        lines=210,
        lacks=(),
    ),
    **{
        f"the mean of the last epochs, {arguments}": Case(
            f"{arguments}, callbacks=[{SWA}]",
            imports="StochasticWeightAveraging",
            methods=NORM,
            configure=scheduled("StepLR(optimizer, 2, 0.5)", ', "interval": "step", "frequency": 2'),
            has=("not self.swa_schedulers",),
            lacks=(),
        )
        for arguments in (
            'max_epochs=3, limit_train_batches=3, precision="bf16-mixed"',
            'max_epochs=4, precision="64-true"',
            "max_epochs=4, max_steps=17",
            "max_steps=9",
        )
    },
    "manual optimization with hooks": Case(
        steps=MANUAL + HALVES,
        optimizer="torch.optim.SGD(self.layers[0].parameters(), lr=0.1)",
        configure=CASES["manual optimization"].configure,
        fit="trainer.fit(Net(), loader(26, shuffle=True))",
        has=("register_step_pre_hook", "model.on_after_backward()"),
        lacks=(),
    ),
    "clipping by value, batches without a loss": Case(
        'max_epochs=2, gradient_clip_val=0.01, gradient_clip_algorithm="value"', steps=SKIPS, lacks=()
    ),
    "a one-cycle schedule of an accumulation that changes": Case(
        "max_epochs=3, max_steps=40, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})]",
        imports="GradientAccumulationScheduler",
        configure=CASES["a one-cycle schedule"].configure,
        lacks=(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_feature(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    text = case.text()
    plain = eject(text, tmp_path / "program.py")
    check_form(plain, case.lines)
    for word in case.has:
        assert word in plain
    for word in case.lacks:
        assert word not in plain.split("# -- the program")[0], word
    assert same(fits(text, plain=False), fits(plain, plain=True))


def test_a_run_that_averages_already_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(f"max_epochs=3, callbacks=[{SWA}]", imports="StochasticWeightAveraging")
    case.configure = scheduled("StepLR(optimizer, 2)")
    case.fit = RESUME.replace("max_epochs=4", f"max_epochs=4, callbacks=[{SWA}]")
    plain = eject(case.text(), tmp_path / "program.py")
    with pytest.raises(ValueError) as caught:
        fits(plain, plain=True)
    assert "middle.ckpt has another optimizer" in str(caught.value)


FORMATTED = (
    "accumulation, clipping and a schedule by steps", "manual optimization", "overridden hooks",
    "optimizer_step and accumulation", "a datamodule", "a callback of the program", "the best checkpoint", "averages",
    "64-true", "few batches", "a train() of its own", "batches without a loss, accumulate_grad_batches=2",
)  # fmt: skip


def test_ruff_agrees_with_the_generated_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ruff")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    for name in FORMATTED:
        plain = eject(CASES[name].text(), tmp_path / "program.py")
        # The program itself stays as it was formatted.
        generated = plain.split("# -- the program")[0].rstrip() + "\n"
        (tmp_path / "plain" / f"{name.replace(' ', '_')}.py").write_text(generated)
    # Closures are called within the turn of the loop that makes them.
    rules = ["--select=E,F,W,I,B,UP", "--ignore=F401,B023"]
    for words in (["check", *rules, "--line-length=100"], ["format", "--check", "--line-length=100"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", "plain"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


GAN = """
import csv
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hasten as L
from hasten.callbacks import LearningRateMonitor
from hasten.loggers import CSVLogger


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        for optimizer in (one, two, one)[: 1 + batch_idx % 3]:
            loss = self.second(self.first(batch[0])).square().mean()
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.second(self.first(batch[0])).square().mean())

    def configure_optimizers(self):
        a = torch.optim.Adam(self.first.parameters(), lr=1e-3)
        b = torch.optim.SGD(self.second.parameters(), lr=1e-2)
        return FORM


L.seed_everything(1)
data = DataLoader(TensorDataset(torch.randn(28, 4)), 4, shuffle=True)
logger = CSVLogger("logs", name="gan")
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=logger, log_every_n_steps=3, enable_progress_bar=False,
    callbacks=[LearningRateMonitor(logging_interval="step")],
)
trainer.fit(GAN(), data, DataLoader(TensorDataset(torch.ones(4, 4)), 4))
rows.extend(csv.DictReader(open(f"{trainer.logger.log_dir}/metrics.csv")))
steps.append((trainer.global_step, [(row["step"], row["epoch"], row.get("loss")) for row in trainer.history]))
"""


@pytest.mark.parametrize(
    "form", ["[a, b]", "(a, b)", "([a, b], [])", "[[a, b], []]", '[{"optimizer": a}, {"optimizer": b}]']
)
def test_a_gan_writes_the_same_rows_however_it_returns_its_optimizers(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GAN.replace("FORM", form)
    plain = eject(text, tmp_path / "program.py")
    check_form(plain, 330)
    found = []
    for place, program in enumerate((text, plain)):
        folder = tmp_path / str(place)
        folder.mkdir()
        monkeypatch.chdir(folder)
        rows: list[dict[str, str]] = []
        steps: list[object] = []
        weights = fits(program, plain=place == 1, state={"rows": rows, "steps": steps})
        # The learning rates have rows of their own with hasten.
        table = [[(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in ("loss", "lr-Adam")]
        found.append((weights, steps, table))
    (own, counts, table), (other, plain_counts, plain_table) = found
    assert same(own, other)
    assert counts == plain_counts
    assert table == plain_table
