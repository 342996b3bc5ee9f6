"""Errors of the user's code keep their type and say what usually mends them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten._lib.explain import remedy_for
from hasten.callbacks import BaseFinetuning, LambdaCallback
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def with_step(step: Any) -> Any:
    return type("Net", (Classifier,), {"training_step": step})()


def reaches_back(self: Any, batch: Any, batch_idx: int) -> Any:
    self.carried = getattr(self, "carried", 0) + self.loss(batch)
    return self.carried


def unpacks_three(self: Any, batch: Any, batch_idx: int) -> Any:
    _x, _y, _z = batch


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            lambda self, batch, batch_idx: self.log("loss", 1.0, on_steps=True),
            ["self.log takes: name, value, prog_bar", "Did you mean 'on_step'?",
             "in Net.training_step, batch 0: list of 2 (Tensor (4, 8) float32, Tensor (4,) int64)"],
        ),
        (lambda self, batch, _: self.loss(batch).detach(), ["does not depend on any parameter"]),
        (lambda self, batch, _: self(batch[0]).sum(1), ["Take its mean"]),
        (lambda self, batch, _: (self(batch[0]).argmax(1) == batch[1]).float().mean(), [".argmax() or =="]),
        (lambda self, batch, _: [self.optimizers()].zero_grad(), ["first, second = self.optimizers()"]),
        (lambda self, batch, _: torch.optim.Adam(self.parameters(), lr="1e-3"), ["Write a number: lr=1e-3"]),
        (
            lambda self, batch, _: torch.optim.lr_scheduler.OneCycleLR(
                torch.optim.Adagrad(self.parameters()), 0.1, total_steps=5
            ),
            ["cycle_momentum=False"],
        ),
        (lambda self, batch, _: next(iter(())), ["give it a default", "again by iter(...)"]),
        (lambda self, batch, _: self.outputs, ["Nothing has set self.outputs so far: set it in Net.__init__"]),
        (lambda self, batch, _: self.layer(batch[0]), ["Did you mean 'layers'?"]),
        (reaches_back, ["Detach what you carry over"]),
        (unpacks_three, ["unpacks the batch into another number of parts"]),
    ],
)  # fmt: skip
def test_an_error_of_the_step_has_a_note_that_mends_it(step: Any, said: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        quiet().fit(with_step(step), loader())
    for text in said:
        assert text in notes(caught.value)


def test_training_in_inference_mode_is_explained() -> None:
    with torch.inference_mode():
        made_inside = Classifier()
    with refused(ValueError, fix="outside", says="Classifier was made in torch.inference_mode()"):
        quiet().fit(made_inside, loader())
    model = Classifier()
    with torch.inference_mode(), pytest.raises(RuntimeError) as caught:
        quiet().fit(model, loader())
    assert "torch.inference_mode(): call it outside" in notes(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DataLoader worker (pid(s) 26230) exited unexpectedly", "num_workers=0"),
        ("CppCompileError: C++ compile error\n/usr/bin/ld: cannot find -ltorch: No such file or directory", "a space"),
    ],
)
def test_what_a_machine_does_is_explained_by_its_text(text: str, said: str) -> None:
    assert said in remedy_for(text)


def test_layers_that_are_unfrozen_for_lbfgs_are_named() -> None:
    model = Classifier()
    first, *others = (layer for layer in model.layers if isinstance(layer, torch.nn.Linear))
    model.configure_optimizers = lambda: torch.optim.LBFGS(first.parameters())  # type: ignore[method-assign]
    unfreeze = LambdaCallback(
        on_train_start=lambda trainer, _: BaseFinetuning.unfreeze_and_add_param_group(others, trainer.optimizers[0])
    )
    with pytest.raises(AssertionError) as caught:
        quiet(callbacks=unfreeze).fit(model, loader())
    assert "Give LBFGS all parameters in configure_optimizers" in notes(caught.value)


class OneCycle(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_scheduler_made_for_fewer_steps() -> None:
    warns = warned(UserWarning, fix="estimated_stepping_batches", says=("total_steps=15", "20 steps"))
    with warns, refused(ValueError, says="total steps is 15") as caught:
        quiet(max_epochs=2).fit(OneCycle(), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=2, limit_train_batches=7).fit(OneCycle(), loader(), loader(4))
    assert "total_steps=self.trainer.estimated_stepping_batches" in notes(caught.value)
    assert "2 epochs of 10 batches" in notes(caught.value)


def test_a_scheduler_whose_plan_is_that_of_a_checkpoint_begins_a_new_one(tmp_path: Path) -> None:
    class Planned(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = quiet(max_epochs=1)
    trainer.fit(Planned(), loader())
    trainer.save_checkpoint(path := tmp_path / "one.ckpt")
    with pytest.raises(ValueError) as caught:
        quiet(max_epochs=2).fit(Planned(), loader(), ckpt_path=path)
    assert "load_from_checkpoint(path), ...) without ckpt_path" in notes(caught.value)
    assert "total_steps=" not in notes(caught.value)
    assert f"The run was resumed from {path}, whose state it uses. Batches since: 1." in notes(caught.value)


@pytest.mark.parametrize(("length", "interval", "other"), [(30, "epoch", "step"), (3, "step", "epoch")])
def test_a_cosine_made_for_the_other_interval_is_said(length: int, interval: str, other: str) -> None:
    class Cosine(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    with warned(UserWarning, says=f"T_max={length}", fix=f"'interval': '{other}'"):
        quiet(max_epochs=3).fit(Cosine(), loader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*T_max")
        quiet(max_epochs=2).fit(Cosine(), loader())


@pytest.mark.parametrize("scheduled", [False, True])
def test_arguments_of_optimizers_that_a_checkpoint_overrides_are_named(tmp_path: Any, scheduled: bool) -> None:
    class Net(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)] if scheduled else []

        def on_train_epoch_end(self) -> None:
            self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1

    trainer = quiet()
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    with warned(UserWarning, says=("lr=0.5", "lr=0.1", "a.ckpt"), fix="param_groups"):
        quiet(max_epochs=2).fit(Net(lr=0.5), loader(), ckpt_path=tmp_path / "a.ckpt")


class WithAdam(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_resuming_with_another_kind_of_optimizer(tmp_path: Any) -> None:
    trainer = quiet()
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "sgd.ckpt")
    with refused(ValueError, fix="Model.load_from_checkpoint(path)"):
        quiet(max_epochs=2).fit(WithAdam(), loader(), ckpt_path=tmp_path / "sgd.ckpt")


@pytest.mark.parametrize("skipped", [{1}, {1, 3}])
def test_skipped_batches_are_told_once(skipped: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    model = with_step(lambda self, batch, index: None if index in skipped else self.loss(batch))
    with warned(UserWarning, fix="training_step") as caught:
        quiet(limit_val_batches=0).fit(model, loader())
    assert len(caught) == 1


OTHER_BATCHES = "for some batches of an accumulation and not for others"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda loss, _: loss.item(), r"Return the loss \(a tensor\).*Do not convert it with \.item\(\)"),
        (lambda loss, _: {"loss": loss, "loss_weight": -1}, r"'loss_weight': -1\}\. Use how many samples"),
        (lambda loss, _: {"loss": loss, "loss_weight": math.nan}, "'loss_weight': nan"),
        (lambda loss, _: {"loss": loss, "loss_weight": torch.tensor(-1.0)}, r"'loss_weight': tensor\(-1\.\)"),
        (lambda loss, _: {"loss": loss, "loss_weight": torch.ones(2)}, r"a tensor of shape \(2,\)"),
        (lambda loss, _: {"loss": loss, "loss_weight": "mean"}, "'loss_weight': 'mean'"),
        (lambda loss, index: {"loss": loss, "loss_weight": 3} if index % 2 else loss, OTHER_BATCHES),
        (lambda loss, index: loss if index % 2 else {"loss": loss, "loss_weight": 3}, OTHER_BATCHES),
    ],
)
def test_other_losses_and_weights_are_refused(output: Any, message: str) -> None:
    model = with_step(lambda self, batch, batch_idx: output(self.loss(batch), batch_idx))
    with pytest.raises(ValueError, match=message):
        quiet(accumulate_grad_batches=2).fit(model, loader())


def test_weights_beside_batches_without_a_loss_are_fine() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        # Windows of (weight, none), (none, weight), (none, none).
        return {"loss": self.loss(batch), "loss_weight": 3} if batch_idx % 6 in (0, 3) else None

    with warned(UserWarning, fix="training_step"):
        quiet(accumulate_grad_batches=2, limit_train_batches=6).fit(with_step(step), loader())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        self.layer = torch.nn.Linear(8, 8)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        self.by = 2


class LaysItFirst(Classifier):
    def __init__(self) -> None:
        self.first = torch.nn.Linear(8, 8)
        super().__init__()


class BuildsItLater(Classifier):
    def configure_model(self) -> None:
        self.block = Block()


class HoldsOne(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()


@pytest.mark.parametrize(
    ("make", "owner"), [(LaysItFirst, LaysItFirst), (BuildsItLater, Block), (HoldsOne, Scale)], ids=str
)
def test_a_module_without_the_init_of_its_base_is_named_with_the_line_to_add(make: Any, owner: type) -> None:
    with pytest.raises(AttributeError) as caught:
        quiet().fit(make(), loader())
    line = owner.__init__.__code__.co_firstlineno  # type: ignore[misc]
    advice = f"Write super().__init__() as the first line of {owner.__name__}.__init__ ({__file__}, line {line})."
    assert notes(caught.value).endswith(advice)


def test_the_place_of_an_error_in_backward_comes_before_what_mends_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(with_step(lambda self, batch, _: self(batch[0]).sum(1)), loader())
    place, remedy = notes(caught.value).splitlines()
    assert place.startswith("in Net.training_step, batch 0")
    assert "Take its mean" in remedy


# -- losses, shapes and batches


def conv(self: Any, batch: Any, batch_idx: int) -> Any:
    self.conv = torch.nn.Conv2d(1, 4, 3)
    return self.conv(torch.zeros(4, 5, 5)).mean()


def half(self: Any, batch: Any, batch_idx: int) -> Any:
    self.layers.half()
    return self.loss(batch)


def truth(self: Any, batch: Any, batch_idx: int) -> Any:
    if batch[0]:
        return None


def read_twice(self: Any) -> Any:
    parameters = self.parameters()
    assert sum(each.numel() for each in parameters)
    return torch.optim.SGD(parameters, lr=0.1)


def frozen(self: Any) -> Any:
    self.requires_grad_(False)
    return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


functional = torch.nn.functional


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda self, batch, _: torch.nn.CrossEntropyLoss(self(batch[0]), batch[1]), "nn.CrossEntropyLoss()("),
        (lambda self, batch, _: torch.nn.MSELoss(self(batch[0]), batch[1]), "nn.MSELoss()("),
        (truth, ".any(), .all()"),
        (
            lambda self, batch, _: functional.cross_entropy(self(batch[0]), batch[1], weight=[1.0, 2.0]),
            "weight=torch.tensor([...], device=self.device)",
        ),
        (conv, "x.unsqueeze(1)"),
        (lambda self, batch, _: self(batch[0].view(-1)).mean(), "x.flatten(1)"),
        (lambda self, batch, _: self(batch[0].T).mean(), "leave .T out"),
        (lambda self, batch, _: functional.cross_entropy(self(batch[0]).argmax(1), batch[1]), "without .argmax()"),
        (lambda self, batch, _: functional.cross_entropy(batch[1], self(batch[0])), "loss(scores, labels)"),
        (lambda self, batch, _: (self(batch[0]).argmax(1) == batch[1]).mean(), "(a == b).float().mean()"),
        (half, "Trainer(precision='16-true')"),
        (lambda self, batch, _: self(batch[0].numpy()).mean(), "torch.from_numpy(x)"),
        (lambda self, batch, _: self.lr_schedulers().step(), "returned no learning rate scheduler"),
        (lambda self, batch, _: [].step(), "The list is empty"),  # type: ignore[attr-defined]
        (lambda self, batch, _: self.lr, "Write self.hparams.lr"),
    ],
)
def test_the_line_to_write_fits_what_is_there(step: Any, said: str) -> None:
    with pytest.raises(Exception) as caught:
        quiet().fit(with_step(step), loader())
    assert said in notes(caught.value)


@pytest.mark.parametrize(
    ("data", "step", "said"),
    [
        (loader().dataset.tensors[0].numpy(), lambda self, batch, _: self(batch).mean(), "TensorDataset(x, y)"),
        (iter([{"x": [1.0] * 8}]), lambda self, batch, _: self(batch["x"]).mean(), "with_format('torch')"),
        (iter([{"x": [1.0] * 8}]), lambda self, batch, _: batch["x"].float(), "with_format('torch')"),
        (
            [("cat", "dog")],
            lambda self, batch, _: functional.cross_entropy(self(torch.ones(2, 8)), batch),
            "names.index",
        ),
    ],
)
def test_data_in_place_of_batches_are_told_what_to_write(data: Any, step: Any, said: str) -> None:
    with pytest.raises(Exception) as caught:
        quiet().fit(with_step(step), data)
    assert said in notes(caught.value)


def test_an_attribute_that_text_lacks_is_explained_if_tensors_have_it() -> None:
    for name, explained in (("to", True), ("items", False)):
        with pytest.raises(AttributeError) as caught:
            quiet().fit(with_step(lambda self, batch, batch_idx, name=name: getattr("text", name)), loader())
        assert ("tokenizer" in notes(caught.value)) is explained


def test_samples_that_are_not_stacked_are_said_to_be() -> None:
    def unpacks(self: Any, batch: Any, batch_idx: int) -> Any:
        _x, _y = batch

    data = torch.utils.data.DataLoader(loader().dataset, batch_size=4, collate_fn=list)
    with pytest.raises(ValueError) as caught:
        quiet().fit(with_step(unpacks), data)
    assert "list of 4 samples" in notes(caught.value)


@pytest.mark.parametrize(("configure", "said"), [(read_twice, "read only once"), (frozen, "requires_grad=False")])
def test_why_an_optimizer_gets_no_parameters(configure: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        quiet().fit(type("Net", (Classifier,), {"configure_optimizers": configure})(), loader())
    assert said in notes(caught.value)


def test_gradients_in_an_evaluation_are_told_how_to_get_them() -> None:
    net = type("Net", (Classifier,), {"validation_step": lambda self, batch, _: self.loss(batch).backward()})()
    with pytest.raises(RuntimeError) as caught:
        quiet().validate(net, loader())
    assert "torch.enable_grad()" in notes(caught.value)
    assert "inference_mode=False" in notes(caught.value)


class IndexFirst(Classifier):
    def training_step(self, i: Any, b: Any) -> Any:  # type: ignore[override]
        x, _ = b
        return self(x).sum()


class TakesIndex(Classifier):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self(batch_idx).sum()


@pytest.mark.parametrize(
    ("model", "said"),
    [(IndexFirst, "Write def training_step(self, b, i)."), (TakesIndex, "Write batch in this line.")],
)
def test_a_step_that_takes_the_index_for_the_batch_is_told_which_is_which(model: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        quiet().fit(model(), loader())
    assert said in notes(caught.value)
    assert "Give a tuple" not in notes(caught.value)
