"""A loss that is not finite is reported, and with on_bad_loss its step is left out, exactly."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from hasten.plugins import Precision
from tests.models import Classifier, dataset, loader, quiet, same_weights
from tests.refusals import refused, warned

BAD = 3


def data(*bad: int, samples: int = 40, batch_size: int = 4, value: float = math.nan) -> DataLoader[Any]:
    """Return batches of which those with the index ``bad`` hold ``value``."""
    x, y = dataset(samples).tensors
    for index in bad:
        x[index * batch_size] = value
    return DataLoader(TensorDataset(x, y), batch_size)


class Net(Classifier):
    """Has running statistics, momentum and weight decay: all that a step with zero gradients would change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"},
        }


class Logs(Net):
    """Takes the logarithm of numbers below 0."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](self.layers[1](torch.log(self.layers[0](x) + x[:, :1]))))


class Closure(Net):
    """Steps by a closure, as every module with an ``optimizer_step``."""

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)


def by_hand(net: Net, batches: Any, *, accumulate: int = 1, clip: float | None = None, epochs: int = 1) -> None:
    """Train as a loop does that leaves out the step of a window whose loss is not finite."""
    configured: Any = net.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for _ in range(epochs):
        listed = list(batches)
        for start in range(0, len(listed), accumulate):
            window = listed[start : start + accumulate]
            buffers = copy.deepcopy(dict(net.named_buffers()))
            losses = [net.loss(batch) for batch in window]
            if all(math.isfinite(loss) for loss in losses):
                optimizer.zero_grad()
                for loss in losses:
                    (loss / len(window)).backward()
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
            else:
                for name, buffer in net.named_buffers():
                    buffer.copy_(buffers[name])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()


# -- "warn"


def test_a_bad_loss_is_told_of_once_with_step_and_cure() -> None:
    trainer = quiet(max_epochs=2, log_every_n_steps=2)
    with warned(UserWarning, fix="Trainer(on_bad_loss='stop')") as said:
        trainer.fit(Classifier(), data(BAD))
    messages = [str(one.message) for one in said if "is nan" in str(one.message)]
    assert len(messages) == 1
    assert messages[0].startswith("The loss of training_step is nan at step 3 (epoch 1); at step 1 it was finite.")
    assert "on_bad_loss='stop'" in messages[0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_bad_loss_is_told_of_at_the_end_of_an_epoch_without_any_interval(value: float) -> None:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch) + (value if batch_idx == 9 else 0.0)}

    with warned(UserWarning, says=("training_step", f"{value}", "step 9")):
        L.Trainer(barebones=True, accelerator="cpu", max_epochs=1).fit(Silent(), loader())


def test_a_bad_logged_loss_is_told_of_with_its_hook() -> None:
    class Val(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch) * math.inf)
            self.log("val_auc", math.nan)

    with warned(UserWarning, says=("'val_loss'", "validation_step", "inf")) as said:
        quiet(max_epochs=2).fit(Val(), loader(), loader(8))
    assert len([one for one in said if "logged in" in str(one.message)]) == 1


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_manual_optimization_is_warned_of_too() -> None:
    with warned(UserWarning, says=("training_step", "nan")):
        quiet().fit(Manual(), data(BAD))
    with refused(FloatingPointError, says=("manual_backward", "nan", "step 3", "epoch 1")):
        quiet(on_bad_loss="stop").fit(Manual(), data(BAD))


# -- "skip"


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("closure", [False, True])
def test_a_step_left_out_changes_nothing(accumulate: int, clip: float | None, closure: bool) -> None:
    mine, plain = (Closure if closure else Net)(), Net()
    batches = data(0, BAD, 7)
    by_hand(plain, batches, accumulate=accumulate, clip=clip, epochs=2)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip, on_bad_loss="skip")
    with warned(UserWarning, says="on_bad_loss='skip'"):
        trainer.fit(mine, batches)
    assert same_weights(mine, plain)
    assert trainer.global_step == 2 * math.ceil(10 / accumulate)
    assert math.isfinite(trainer.callback_metrics["train_loss_epoch"])


def test_a_bad_gradient_of_a_finite_loss_is_left_out() -> None:
    class Zero(Net):
        # The derivative of the root of 0 is infinite.
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + torch.sqrt((self.layers[0].weight * 0).sum()) if batch_idx == BAD else loss

    mine, plain = Zero(), Net()
    listed = list(data())
    quiet(on_bad_loss="skip").fit(mine, listed)
    by_hand(plain, [*listed[:BAD], (listed[BAD][0] * math.nan, listed[BAD][1]), *listed[BAD + 1 :]])
    assert same_weights(mine, plain)
    says_where = warned(UserWarning, says="MulBackward0")
    with says_where, refused(FloatingPointError, says=("step 3", "'MulBackward0'")):
        quiet(on_bad_loss="stop").fit(Zero(), listed)


def test_what_is_left_out_is_counted_and_said_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), warned(UserWarning, says=("2 steps", "5 in")):
        quiet(on_bad_loss="skip", log_every_n_steps=5).fit(Classifier(), data(1, 4, 6, value=math.inf))
    assert "left out 1 step (3 of 10 in this run). The last: The loss of training_step is nan at step 6" in caplog.text


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_the_run_ends_when_too_many_steps_are_left_out(mode: str) -> None:
    model = Classifier()
    before = copy.deepcopy(model)
    with refused(FloatingPointError, "on_bad_loss", fix="on_bad_loss='stop'"):
        quiet(max_epochs=5, on_bad_loss=mode).fit(model, data(*range(10)))
    assert same_weights(model, before)
    with refused(FloatingPointError, "on_bad_loss"):
        quiet(on_bad_loss=mode).fit(Classifier(), data(*range(4), samples=16))


def test_an_optimizer_step_that_changes_weights_before_the_loss_is_refused() -> None:
    class Perturbs(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(0.1)
            return super().step(closure)

    class Sam(Classifier):
        def configure_optimizers(self) -> Any:
            return Perturbs(self.parameters(), lr=0.1)

    class OwnStep(Sam):
        def optimizer_step(self, *arguments: Any, **options: Any) -> None:
            super().optimizer_step(*arguments, **options)

    mine, plain = Sam(), Sam()
    plain.load_state_dict(mine.state_dict())
    quiet(on_bad_loss="skip").fit(mine, data(BAD))
    quiet().fit(plain, [batch for index, batch in enumerate(data()) if index != BAD])
    assert same_weights(mine, plain)
    with refused(RuntimeError, "on_bad_loss", fix="on_bad_loss='warn'"):
        quiet(on_bad_loss="skip").fit(OwnStep(), data(BAD))


# -- "stop"


def test_the_run_stops_before_the_step_and_names_the_layer(tmp_path: Path) -> None:
    class Sqrt(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    class Roots(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = Sqrt()

    class Last(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (math.inf if batch_idx == BAD else 1.0)

    with refused(FloatingPointError, says=("nan at step 0", "layers.1 (BatchNorm1d)")):
        quiet(on_bad_loss="stop").fit(Logs(), data())
    with refused(FloatingPointError, says="layers.1 (Sqrt)"):
        quiet(on_bad_loss="stop").fit(Roots(), data())
    with refused(FloatingPointError, says=("inf", "step 3")):
        quiet(on_bad_loss="stop").fit(Last(), data())
    with refused(FloatingPointError, says=("nan", "step 3", "epoch 1", "batch[0]")):
        quiet(on_bad_loss="stop").fit(Net(), data(BAD))


def test_anomaly_mode_names_the_layer_too() -> None:
    shown = pytest.warns(UserWarning, match="Error detected in")
    with shown, refused(RuntimeError, says="nan") as caught:
        quiet(detect_anomaly=True).fit(Logs(), data())
    assert "First not finite: the input of layers.1 (BatchNorm1d)." in caught.value.__notes__


def test_a_stopped_run_is_saved_and_goes_on_after_the_bad_batch(tmp_path: Path) -> None:
    mine, plain = Net(), Net()
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 2}
    with refused(FloatingPointError, fix="on_bad_loss='skip'"):
        quiet(on_bad_loss="stop", **options).fit(mine, data(BAD))
    (path,) = tmp_path.rglob("last*.ckpt")
    resumed = Net()
    quiet(on_bad_loss="skip", max_epochs=1).fit(resumed, data(BAD), ckpt_path=path)
    by_hand(plain, data(BAD))
    assert same_weights(resumed, plain)


# -- "rewind"


@pytest.mark.parametrize("closure", [False, True])
def test_a_run_goes_back_to_the_state_kept_before(closure: bool) -> None:
    states: list[Any] = []

    class Keeps(Closure if closure else Net):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            states.append(copy.deepcopy((self.state_dict(), self.optimizers().state_dict()["state"])))

    model = Keeps()
    trainer = quiet(max_epochs=1, log_every_n_steps=4, on_bad_loss="rewind")
    with warned(UserWarning, says="1 step"):
        trainer.fit(model, data(6))
    weights, moments = states[3]
    assert all(torch.equal(weights[name], states[6][0][name]) for name in weights)
    for index, kept in moments.items():
        assert all(torch.equal(value, states[6][1][index][name]) for name, value in kept.items())
    assert trainer.global_step == 10
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)


@pytest.mark.parametrize("average", [EMAWeightAveraging(decay=0.5), StochasticWeightAveraging(0.01, 1)])
def test_an_average_goes_back_with_the_weights(average: L.Callback) -> None:
    class Overflows(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            # The loss before was finite. It is the last batch of the first epoch.
            if self.global_step == 10:
                nn.init.constant_(self.layers[3].bias, math.inf)

    model = Overflows()
    with warned(UserWarning, says="1 step"):
        quiet(max_epochs=2, log_every_n_steps=4, on_bad_loss="rewind", callbacks=[average]).fit(model, data())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


class WithOwn(Classifier):
    def configure_optimizers(self) -> Any:
        return OwnOptimizer(self.parameters())


class Replaced(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)]


@pytest.mark.parametrize("kind", [WithOwn, Replaced])
def test_a_run_goes_back_with_any_optimizer(kind: type[Classifier]) -> None:
    model = kind()
    with warned(UserWarning, says="2 steps"):
        quiet(on_bad_loss="rewind").fit(model, data(BAD, 7))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["skip", "rewind"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_leaves_out_the_same(tmp_path: Path, mode: str, accumulate: int) -> None:
    options: dict[str, Any] = {
        "max_epochs": 2,
        "on_bad_loss": mode,
        "log_every_n_steps": 4,
        "accumulate_grad_batches": accumulate,
    }
    save = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    whole, resumed = Net(), Net()
    quiet(callbacks=[save], enable_checkpointing=True, **options).fit(whole, data(2, 5, 6))
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: torch.load(path)["global_step"])
    again = L.callbacks.ModelCheckpoint(tmp_path / "again", every_n_train_steps=3, save_top_k=-1)
    quiet(callbacks=[again], enable_checkpointing=True, **options).fit(resumed, data(2, 5, 6), ckpt_path=first)
    assert same_weights(resumed, whole)


# -- what cannot be asked for


class InBackward(Classifier):
    def configure_optimizers(self) -> Any:
        return L.optim.in_backward(torch.optim.SGD, self.parameters(), lr=0.1)


class Without(Classifier):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Net, {"on_bad_loss": "skp"}, r"Trainer\(on_bad_loss='skp'\): 'skp' is unknown. Did you mean 'skip'"),
        (Manual, {"on_bad_loss": "skip"}, "Test the loss there before"),
        (InBackward, {"on_bad_loss": "skip"}, r"='skip'\): each parameter steps in backward"),
        (Without, {"on_bad_loss": "rewind"}, "no optimizer, so there is no step to leave out"),
        (Net, {"on_bad_loss": "skip", "detect_anomaly": True}, r"detect_anomaly=True, on_bad_loss='skip'\)"),
    ],
)
def test_what_cannot_be_is_refused(kind: type[Classifier], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(**options).fit(kind(), data())


def test_a_run_without_an_optimizer_is_stopped() -> None:
    with refused(FloatingPointError, says=("nan", "step 3")):
        quiet(on_bad_loss="stop").fit(Without(), data(BAD))


class Short:
    """Promises more batches than it gives."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches) + 3

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("closure", [False, True])
def test_a_window_that_the_end_of_the_data_closes_is_left_out_too(closure: bool) -> None:
    mine, plain = (Closure if closure else Net)(), Net()
    quiet(on_bad_loss="skip", accumulate_grad_batches=4).fit(mine, Short(data(8)))
    by_hand(plain, data(8), accumulate=4)
    assert same_weights(mine, plain)
    with refused(FloatingPointError, says=("nan", "step 2")):
        quiet(on_bad_loss="stop", accumulate_grad_batches=4).fit(Net(), Short(data(8)))


# -- several processes


class BadOnOne(Net):
    """Has a bad loss on the second process alone, whose gradient is zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        bad = batch_idx == BAD and self.global_rank == 1
        return loss + math.inf if bad else loss

    def on_train_batch_end(self, *_: Any) -> None:
        total = torch.stack([parameter.detach().sum() for parameter in self.parameters()]).sum()
        both = self.all_gather(total)
        assert both[0] == both[1]
        if self.trainer.fit_loop.batch_idx == BAD:
            assert total == self.before
        self.before = total


@pytest.mark.parametrize("mode", ["skip", "stop"])
def test_all_processes_leave_out_the_same_step(mode: str) -> None:
    trainer = quiet(devices=2, strategy="ddp_fork", on_bad_loss=mode)
    if mode == "skip":
        trainer.fit(BadOnOne(), loader())
        assert trainer.global_step == 5
    else:
        with pytest.raises(Exception, match=r"On another process the loss|is inf at step 3"):
            trainer.fit(BadOnOne(), loader())


# -- a gradient scaler


class Scaled(Precision):
    """32-bit numbers and a gradient scaler, which the CPU has too."""

    def __init__(self, scale: float) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_steps_that_a_scaler_leaves_out_are_its_own_business(mode: str, recwarn: pytest.WarningsRecorder) -> None:
    class Large(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 100 * self.loss(batch)

    precision = Scaled(2.0**127)
    quiet(on_bad_loss=mode, plugins=precision).fit(Large(), data())
    assert precision.scaler.get_scale() < 2.0**127
    assert not [one for one in recwarn if "left out" in str(one.message)]


def test_a_bad_loss_leaves_the_scaler_alone() -> None:
    precision, plain = Scaled(1024.0), Net()
    mine = Net()
    quiet(on_bad_loss="skip", plugins=precision).fit(mine, data(BAD))
    by_hand(plain, data(BAD))
    assert precision.scaler.get_scale() == 1024.0
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
