"""Mistakes that would train nothing, or something else than the program says, are refused or warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hasten as L
from hasten.callbacks import EarlyStopping, ModelCheckpoint
from tests.models import Classifier, Manual, loader, quiet
from tests.refusals import refused, warned

Batches = Iterator[Any]


def batches(number: int = 4) -> Batches:
    for _ in range(number):
        yield torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)


class ReadOnce(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rest = batches()

    def __iter__(self) -> Batches:
        return self.rest


class NoSamples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


# -- data that ends


def test_a_generator_trains_one_epoch_and_is_refused_in_the_next() -> None:
    with refused(ValueError, "train_dataloaders", fix="DataLoader", says=("epoch 2", "generator")):
        # Counted in steps, such a fit would never end.
        quiet(max_epochs=-1, max_steps=20).fit(Classifier(), batches())
    trainer = quiet(max_epochs=1)
    trainer.fit(Classifier(), batches())
    assert trainer.global_step == 4


@pytest.mark.world_size(2)
def test_so_it_is_on_several_processes() -> None:
    with refused(ValueError, "train_dataloaders", fix="DataLoader", says=("epoch 2", "generator")):
        quiet(devices=2, strategy="ddp", max_epochs=-1, max_steps=20).fit(Classifier(), batches())


def test_a_dataset_that_does_not_begin_anew_is_named() -> None:
    with refused(ValueError, "train_dataloaders", fix="ReadOnce.__iter__()", says="epoch 2"):
        quiet(max_epochs=-1, max_steps=20).fit(Classifier(), DataLoader(ReadOnce(), batch_size=None))
    # A stream may have samples again in a later epoch.
    with warned(UserWarning, says="epoch 2", fix="ReadOnce.__iter__()"):
        quiet(max_epochs=3).fit(Classifier(), DataLoader(ReadOnce(), batch_size=None))


def test_an_evaluation_of_a_generator_at_its_end_is_said() -> None:
    data, trainer = batches(), quiet()
    assert trainer.validate(Classifier(), data, verbose=False)[0]
    with warned(UserWarning, says=("val_dataloader", "generator"), fix="DataLoader"):
        assert trainer.validate(Classifier(), data, verbose=False) == [{}]
    # Each validation of a stream that has no samples at all is empty, which is said once.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet(max_epochs=3, num_sanity_val_steps=1).fit(Classifier(), loader(), DataLoader(NoSamples()))
    (one,) = (str(warning.message) for warning in said if "NoSamples" in str(warning.message))
    assert "Look at the data that it reads" in one


@pytest.mark.parametrize("data", [{"x": torch.zeros(4, 8), "y": torch.zeros(4)}, {"names": "ab"}])
def test_a_dict_that_holds_no_loaders_is_refused(data: dict[str, Any]) -> None:
    with refused(TypeError, fix="DataLoader(TensorDataset(x, y)", says="keys"):
        quiet().fit(Classifier(), data)


def test_a_second_fit_that_trains_nothing_is_said() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Classifier(), loader())
    with warned(UserWarning, says="max_epochs=1", fix="trainer.fit_loop.max_epochs = 2"):
        trainer.fit(Classifier(), loader())
    trainer.fit_loop.max_epochs = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(Classifier(), loader())


# -- hooks that do not run, or get other arguments


def yields(self: Any, *args: Any) -> Iterator[int]:
    yield 1


async def waits(self: Any, *args: Any) -> int:
    return 1


@pytest.mark.parametrize("hook", ["training_step", "validation_step", "on_train_epoch_end", "configure_optimizers"])
@pytest.mark.parametrize("function", [yields, waits])
def test_a_hook_that_a_call_does_not_run_is_refused(hook: str, function: Any) -> None:
    word = "yield" if function is yields else "async"
    with refused(ValueError, fix=hook, says=(f"Net.{hook}()", word)):
        quiet().fit(type("Net", (Classifier,), {hook: function})(), loader())


def test_a_datamodule_may_yield_its_batches() -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            yield from batches()

    trainer = quiet(max_epochs=1)
    trainer.fit(Classifier(), datamodule=Data())
    assert trainer.global_step == 4


class Swapped(Classifier):
    def training_step(self, batch_idx: Any, batch: Any) -> Any:  # type: ignore[override]
        return self.loss(batch)


class SwappedCallback(L.Callback):
    def on_train_epoch_end(self, pl_module: Any, trainer: Any) -> None: ...


def test_arguments_in_another_order_are_refused() -> None:
    with refused(ValueError, fix="def training_step(self, batch, batch_idx)", says="(batch_idx, batch)"):
        quiet().fit(Swapped(), loader())
    with refused(ValueError, fix="def on_train_epoch_end(self, trainer, pl_module)", says="(pl_module, trainer)"):
        quiet(callbacks=SwappedCallback()).fit(Classifier(), loader())


# -- parameters that nothing trains


class NewLayers(Classifier):
    def on_train_start(self) -> None:
        self.layers = nn.Sequential(nn.Linear(8, 2))


def test_layers_replaced_after_the_optimizers_were_made_are_said() -> None:
    with warned(UserWarning, says=("NewLayers", "layers.0.weight"), fix="configure_model"):
        quiet(max_epochs=1).fit(NewLayers(), loader())


class Keeps(Manual):
    """Sets no gradients to zero."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Clears(Manual):
    """Sets the gradients to zero as ``clear`` says, after a backward that adds to them, as in a GAN."""

    def __init__(self, clear: str) -> None:
        super().__init__()
        self.clear = clear

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if self.clear == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif self.clear == "module":
            self.zero_grad()
        elif self.clear == "data":
            for parameter in self.parameters():
                parameter.grad.data.zero_()
        else:
            for parameter in self.parameters():
                parameter.grad = None
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()


class Forgets(Manual):
    """Has no gradients when it steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().zero_grad()
        self.optimizers().step()


class NeverSteps(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


class Scheduled(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("model", "says", "fix"),
    [
        (Keeps, ("Keeps.training_step", "SGD"), "optimizer.zero_grad()"),
        (Forgets, ("Forgets.training_step", "SGD"), "then manual_backward(loss)"),
        (NeverSteps, ("NeverSteps.training_step", "global_step"), "self.optimizers().step()"),
        (Scheduled, ("Scheduled", "StepLR"), "self.lr_schedulers().step()"),
    ],
)
def test_what_manual_optimization_forgets_is_said(model: type[Manual], says: tuple[str, ...], fix: str) -> None:
    with warned(UserWarning, says=says, fix=fix):
        quiet(max_epochs=1).fit(model(), loader())


@pytest.mark.parametrize("clear", ["zeros", "module", "data", "none"])
def test_gradients_cleared_in_any_way_are_not_warned_of(clear: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")
        quiet(max_epochs=1).fit(Clears(clear), loader())


# -- values and names


def test_a_batch_size_of_several_numbers_is_refused() -> None:
    class Net(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, batch_size=batch[0])
            return self.loss(batch)

    with refused(ValueError, "batch_size", fix="len(x)", says="(4, 8)"):
        quiet().fit(Net(), loader())


@pytest.mark.parametrize("path", [3, True, {"state_dict": {}}])
def test_a_checkpoint_path_of_another_type_is_refused(path: Any) -> None:
    with refused(TypeError, "ckpt_path", says=("'last'", type(path).__name__)):
        quiet().fit(Classifier(), loader(), ckpt_path=path)
    trainer = quiet()
    trainer.validate(Classifier(), loader(), verbose=False)
    with refused(TypeError, "filepath", says=type(path).__name__):
        trainer.save_checkpoint(path)


def test_a_file_name_with_the_ending_is_said() -> None:
    with warned(UserWarning, says="filename='best.ckpt'", fix=".ckpt"):
        ModelCheckpoint(filename="best.ckpt")


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("epochs", "max_epochs=3"),
        ("num_epochs", "max_epochs=3"),
        ("steps", "max_steps=3"),
        ("lr", "lr=3"),
        ("model", "fit"),
    ],
)
def test_the_arguments_of_other_trainers_have_a_line(argument: str, instead: str) -> None:
    with refused(TypeError, argument, fix=instead):
        L.Trainer(**{argument: 3})


# -- notes at errors of Python and torch


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


class TwoOptimizers(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        _first, _second = self.optimizers()


class HidesLog(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.log = {}  # type: ignore[assignment]


class LogsDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log({"x": 1.0})  # type: ignore[call-arg, arg-type]


class NoLayers(L.LightningModule):
    training_step = Classifier.training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (TwoOptimizers, "optimizer = self.optimizers()"),
        (HidesLog, "self.log is a dict that hides the method log()"),
        (LogsDict, "self.log_dict(values)"),
        (NoLayers, "Make the layers in __init__"),
    ],
)
def test_errors_of_python_get_the_line_to_write(model: type[L.LightningModule], note: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        quiet().fit(model(), loader())
    assert note in notes(caught.value)


@pytest.mark.parametrize(("name", "note"), [("device", "give yours another name"), ("hparams", "save_hyperparameters")])
def test_an_attribute_that_the_module_keeps_itself_is_explained(name: str, note: str) -> None:
    with pytest.raises(AttributeError) as caught:
        setattr(Classifier(), name, {})
    assert note in notes(caught.value)


class WithoutInit(EarlyStopping):
    def __init__(self) -> None:
        self.mine = 1


def test_a_callback_without_the_init_of_its_base_is_explained() -> None:
    with pytest.raises(AttributeError) as caught:
        quiet(callbacks=WithoutInit())
    assert "super().__init__()" in notes(caught.value)


# -- steps that change no weight


class NoClosure(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step()


def test_a_closure_that_optimizer_step_does_not_pass_on_is_an_error_of_the_first_batch() -> None:
    with refused(ValueError, fix="optimizer.step(closure=optimizer_closure)", says=("NoClosure", "batch 0")):
        quiet().fit(NoClosure(), loader())


class MovesNothing(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0] *= 2


@pytest.mark.parametrize(("accumulate", "manual"), [(1, False), (2, False), (1, True)])
def test_batches_that_are_all_none_end_the_epoch_with_the_reason(accumulate: int, manual: bool) -> None:
    model = MovesNothing()
    model.automatic_optimization = not manual
    with refused(ValueError, fix="`return`", says="None"):
        quiet(accumulate_grad_batches=accumulate).fit(model, loader())


def test_some_batches_that_are_none_are_skipped() -> None:
    given = iter(range(100))

    def every_other(samples: Any) -> Any:
        return torch.utils.data.default_collate(samples) if next(given) % 2 else None

    data = loader().dataset
    trainer = quiet(max_epochs=2)
    trainer.fit(Classifier(), DataLoader(data, batch_size=4, collate_fn=every_other))
    assert trainer.global_step == trainer.num_training_batches


class OfANumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(self.loss(batch).item(), requires_grad=True)


class BeforeItsHead(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.head(super().forward(x))

    def configure_optimizers(self) -> Any:
        return self.optimizer


def test_gradients_that_the_step_drops_from_an_accumulation_are_said() -> None:
    class Drops(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers().zero_grad()
            return super().training_step(batch, batch_idx)

    with warned(UserWarning, says=("Drops.training_step", "zero_grad()", "accumulate_grad_batches=2")):
        quiet(accumulate_grad_batches=2).fit(Drops(), loader())

    class OfAnother(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nn.Linear(2, 2).zero_grad()
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*zero_grad")
        quiet().fit(Drops(), loader())
        quiet(accumulate_grad_batches=2).fit(OfAnother(), loader())


class Steps(Classifier):
    def on_train_batch_end(self, *args: Any) -> None:
        self.optimizers().step()


class StepsInItsHook(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Backward(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        return loss


class Clips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        return self.loss(batch)


class ClipsByHandOrNot(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()
        return loss


class Scales(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaler.scale(self.loss(batch))


class ScalesAndUnscales(Scales):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)
        self.scaler.update()


@pytest.mark.parametrize(
    ("kind", "arguments", "said", "fix"),
    [
        (Steps, {}, "twice per batch", "automatic_optimization = False"),
        (Backward, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2", "torch.autograd.grad"),
        (Backward, {"micro_batch": 2}, "micro_batch=2", "torch.autograd.grad"),
        (Clips, {}, "not clipped", "gradient_clip_val=1.0"),
        (Scales, {}, "self.scaler", "precision='16-mixed'"),
    ],
)
def test_work_of_the_trainer_that_a_step_does_as_well_is_said(kind: Any, arguments: Any, said: str, fix: str) -> None:
    with warned(UserWarning, says=(kind.__name__, said), fix=fix):
        quiet(**arguments).fit(kind(), loader())


@pytest.mark.parametrize("kind", [StepsInItsHook, Backward, ClipsByHandOrNot, ScalesAndUnscales])
def test_such_work_that_changes_no_result_is_left_alone(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet().fit(kind(), loader(), loader())


class FromZero(Classifier):
    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: done / 10)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


class WarmsUpBySteps(FromZero):
    interval = "step"


def test_weights_that_a_whole_epoch_leaves_as_they_were_are_said() -> None:
    with warned(UserWarning, says=("OfANumber", "no weight"), fix="torch.tensor(...)"):
        quiet().fit(OfANumber(), loader())
    with warned(UserWarning, says=("head.weight, head.bias",), fix="configure_optimizers"):
        quiet().fit(BeforeItsHead(), loader())
    with warned(UserWarning, says=("learning rate of SGD is 0", "no weight"), fix="lr=1e-3"):
        quiet().fit(Classifier(lr=0.0), loader())
    with warned(UserWarning, says=("learning rate of SGD is 0", "no weight"), fix="Let LambdaLR begin above 0"):
        quiet(max_epochs=2).fit(FromZero(), loader())

    class Ramp(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (batch_idx == 0)

    class LazyHead(Classifier):
        """Trains the layer that its first batch makes, and no other."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.head(batch[0]), batch[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet().fit(Ramp(lr=0.0), loader(16), loader(4))
        quiet().fit(WarmsUpBySteps(), loader(16), loader(4))
        quiet().fit(LazyHead(), loader(16), loader(4))


@pytest.mark.parametrize(
    "arguments",
    [{"check_val_every_n_epoch": 3}, {"val_check_interval": 1000, "check_val_every_n_epoch": None}],
)
def test_a_fit_without_any_validation_is_said(arguments: Any) -> None:
    with warned(UserWarning, says=("no validation", *arguments), fix="limit_val_batches=0"):
        quiet(max_epochs=2, **arguments).fit(Classifier(), loader(), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=3, check_val_every_n_epoch=3).fit(Classifier(), loader(), loader())
        quiet(max_epochs=2, limit_val_batches=0, **arguments).fit(Classifier(), loader(), loader())


def test_a_dict_without_a_loss_is_refused_and_not_skipped() -> None:
    class NoLoss(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": None}

    with refused(ValueError, says=("NoLoss", "'loss': None")):
        quiet().fit(NoLoss(), loader())


def test_a_hook_that_module_and_datamodule_have_is_said_to_be_the_datamodule_s() -> None:
    class Moves(Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    with warned(UserWarning, says=("on_after_batch_transfer", "Moves", "Data"), fix="one of them"):
        quiet().fit(Moves(), datamodule=Data())


def test_the_best_of_several_callbacks_is_named(tmp_path: Any) -> None:
    one, two = (ModelCheckpoint(tmp_path / name, monitor=name) for name in ("val_loss", "train_loss"))
    trainer = quiet(callbacks=[one, two], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(), loader())
    with warned(UserWarning, says=one.best_model_path, fix="best_model_path"):
        trainer.validate(Classifier(), loader(), ckpt_path="best")


# -- what only looks like it


class Stale(torch.optim.Optimizer):
    """Writes weights in a way that torch does not count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)
        return loss


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.SGD(p, lr=0.1, fused=True), Stale],
)
def test_weights_that_change_without_being_counted_are_not_said_to_stay(make: Any) -> None:
    model = Classifier()
    model.configure_optimizers = lambda: make(model.parameters())  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Validation clears the gradients before the end of the epoch.
        quiet(max_epochs=1).fit(model, loader(), loader())


class Twice(Classifier):
    """Calls the closure twice, and has no loss for every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


@pytest.mark.filterwarnings("ignore:.*returned None")
def test_a_batch_without_a_loss_counts_once_however_often_it_is_computed() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Twice(), loader())
    assert trainer.global_step == trainer.num_training_batches


class TwoByHand(BeforeItsHead):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.optim.SGD(self.head.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.second.step()


class Iterable(L.Callback):
    seen = 0

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


def test_layers_that_another_optimizer_trains_and_callbacks_that_can_be_iterated_are_fine() -> None:
    model, callback = TwoByHand(), Iterable()
    model.configure_callbacks = lambda: callback  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=1).fit(model, loader(), loader())
    assert callback.seen > 0
