"""Micro-batches: the step is that of the whole batch, and is begun again where memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import hasten as L
from hasten.callbacks import LambdaCallback
from hasten.data import MicroBatch
from hasten.precision.base import Precision
from tests.models import Classifier, Manual, dataset, loader, quiet
from tests.refusals import refused, warned
from tests.rules.test_no_sync import EVERY, HostMethods, HostReads, Logs, between_intervals
from tests.rules.test_no_sync import data as numbers


def trained(model: L.LightningModule, data: Any, **arguments: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    trainer = quiet(**arguments)
    trainer.fit(model, data)
    return trainer


def fresh(kind: type[Classifier] = Classifier, **options: Any) -> Any:
    L.seed_everything(0, verbose=False)
    return kind(**options)


def assert_same(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=atol)


def alike(
    kind: type[Classifier], data: Any, micro_batch: Any, *, atol: float = 1e-6, **arguments: Any
) -> list[L.Trainer]:
    """Train on whole batches and on parts: the weights are the same; return both Trainers."""
    models = [fresh(kind), fresh(kind)]
    trainers = [
        trained(model, data, micro_batch=size, **arguments)
        for model, size in zip(models, (None, micro_batch), strict=True)
    ]
    assert_same(*models, atol=atol)
    return trainers


# -- the size of a batch


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        data = dataset(self.samples)
        return (data[index] for index in range(self.samples))


class Seen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(len(batch[0]))


def test_batches_have_the_size_given_and_every_sample_comes_once() -> None:
    model, given = Seen(), loader(40, 4, shuffle=True)
    trainer = quiet(batch_size=16, num_sanity_val_steps=0)
    trainer.fit(model, given, loader(8, 4))
    assert [len(batch) for batch in model.batches] == [16, 16, 8]
    assert trainer.global_step == 3
    assert sorted(torch.cat(model.batches).tolist()) == sorted(dataset(40).tensors[0].tolist())
    assert given.batch_size == given.batch_sampler.batch_size == 4
    # Validation keeps the batches of its loader.
    assert model.validated == [4, 4]
    trained(model := Seen(), DataLoader(Stream(10), batch_size=2), batch_size=6)
    assert [len(batch) for batch in model.batches] == [6, 4]


@pytest.mark.parametrize(
    ("data", "argument"),
    [
        ([dataset(4)[:]], "batch_size"),
        (DataLoader(dataset(4), batch_size=None), "batch_size"),
        (
            DataLoader(dataset(4), batch_sampler=type("Odd", (BatchSampler,), {})(range(4), 2, False)),
            "batch_size",
        ),
    ],
    ids=["list", "unbatched", "batch-sampler"],
)
def test_a_loader_whose_batches_are_its_own_is_refused(data: Any, argument: str) -> None:
    with refused(ValueError, argument):
        trained(Classifier(), data, batch_size=4)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size=0\): use a number of samples, at least 1"),
        ({"batch_size": "64"}, ValueError, "use a number of samples"),
        ({"batch_size": True}, TypeError, "not bool"),
        ({"micro_batch": -1}, ValueError, "or 'auto'"),
        ({"micro_batch": 2.0}, TypeError, "use a number of samples"),
        ({"micro_batch": "atuo"}, ValueError, "Did you mean 'auto'"),
        ({"batch_size": 8, "batching": "tokens:64"}, ValueError, "with max_tokens=64 the tokens say"),
        ({"batch_size": 8, "micro_batch": 16}, ValueError, "micro_batch=8 or less, or batch_size=16"),
        ({"memory": "selectve"}, ValueError, "Did you mean 'selective'"),
        ({"micro_batch": MicroBatch(0)}, ValueError, "at least 1"),
        ({"micro_batch": MicroBatch(2, shared="w")}, TypeError, r"shared='w'\)\): use a list"),
        ({"micro_batch": MicroBatch(None)}, TypeError, "number of samples, at least 1, or 'auto'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        quiet(**arguments)


# -- the maths


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(1, 1), (3, 3), (4, 1), (64, 3)])
def test_weights_are_those_of_the_whole_batch(micro_batch: int, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "gradient_clip_val": 0.5}
    alike(Classifier, loader(43, 10), micro_batch, **options)


class Tokens(Classifier):
    """The loss is the mean over tokens: some samples have few."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mask = (x > 0.3).float()
        loss = (nn.functional.cross_entropy(self(x), y, reduction="none")[:, None] * mask).sum() / mask.sum()
        return {"loss": loss, "loss_weight": mask.sum().detach()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_means_over_tokens_are_weighted_by_the_number_of_tokens(accumulate: int) -> None:
    losses: list[float] = []

    def note(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        losses.append(float(outputs["loss"]) / (float(outputs["loss_weight"]) if accumulate > 1 else 1.0))

    watch = LambdaCallback(on_train_batch_end=note)
    alike(Tokens, loader(40, 8), 3, accumulate_grad_batches=accumulate, callbacks=[watch])
    assert losses[:5] == pytest.approx(losses[5:], abs=1e-5)


def test_optimizers_that_call_the_closure_themselves() -> None:
    class Quasi(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    alike(Quasi, loader(20, 10), 4, atol=1e-4)


def test_hooks_see_one_step_and_its_mean_loss() -> None:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("start", len(batch[0]), batch_idx))

        def on_before_zero_grad(self, *_: Any) -> None:
            self.seen.append("zero")

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            self.seen.append(("backward", round(module.layers[0].weight.grad.abs().sum().item(), 5)))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("end", len(batch[0]), batch_idx, round(outputs["loss"].item(), 5)))
            self.seen.append((outputs["found"].shape, outputs["right"].item()))

    class Outputs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = self(batch[0]).argmax(1)
            return {"loss": self.loss(batch), "found": found, "right": (found == batch[1]).sum()}

    alike(Outputs, loader(20, 10), 3, callbacks=[watch := Watch()])
    half = len(watch.seen) // 2
    assert watch.seen[:half] == watch.seen[half:]
    assert watch.seen[-2][0] == "end"


def values(trainer: L.Trainer) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def logged_alike(kind: type[Classifier], data: Any, micro_batch: int) -> dict[str, float]:
    """Train on whole batches and on parts: each step logs the same; return the last values."""
    steps: list[dict[str, float]] = []
    watch = LambdaCallback(on_train_batch_end=lambda trainer, *_: steps.append(values(trainer)))
    whole, parts = map(values, alike(kind, data, micro_batch, callbacks=[watch]))
    half = len(steps) // 2
    for one, other in zip([*steps[:half], whole], [*steps[half:], parts], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    return whole


def test_logged_values_are_those_of_the_whole_batch() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Logs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = self.loss(batch)
            self.accuracy(self(x).argmax(1), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("only_step", loss, on_step=True, on_epoch=False)
            self.log("samples", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
            self.log("largest", x.max(), reduce_fx="max", on_step=True, on_epoch=True)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("after", outputs["loss"], on_step=False, on_epoch=True)

    assert logged_alike(Logs, loader(20, 10), 3)["samples_epoch"] == 20


@pytest.mark.parametrize(("samples", "micro_batch"), [(26, 3), (28, 4)])
def test_a_batch_size_given_to_log_counts_as_for_the_whole_batch(samples: int, micro_batch: int) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            x, y = batch
            # One number for the whole batch, the samples of a part, its tokens, those that count.
            for name, size in (("whole", 8), ("samples", len(x)), ("tokens", x.numel())):
                self.log(name, loss, on_step=True, on_epoch=True, batch_size=size)
            counted = nn.functional.cross_entropy(self(x), y, ignore_index=0, reduction="sum")
            ones = max(int(y.sum()), 1)
            self.log("counted", counted / ones, on_step=True, on_epoch=True, batch_size=ones)
            self.log("number", loss.item(), on_step=True, on_epoch=True, batch_size=8)
            self.log("twice", loss, batch_size=8, on_epoch=True)
            self.log("twice", loss * 2, batch_size=8, on_epoch=True)
            return loss

    logged_alike(Logs, loader(samples, 8), micro_batch)


@pytest.mark.parametrize("micro_batch", [2, "auto"])
def test_nothing_is_read_from_the_device_after_the_first_step(micro_batch: Any) -> None:
    reads = HostReads()
    with reads, HostMethods(reads):
        quiet(micro_batch=micro_batch, log_every_n_steps=EVERY).fit(Logs(reads), numbers())
    # With "auto" the first step shows which tensors a step changes.
    assert [read for read in between_intervals(reads) if read[0] > 0] == []


def test_fp16_scaling_skips_and_scales_as_for_the_whole_batch() -> None:
    class Half(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # One batch overflows: its step is skipped.
            return self.loss(batch) * (1e38 if batch_idx == 1 else 1.0)

    class Scaled(Precision):
        def __init__(self) -> None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    whole, parts, scales = fresh(Half), fresh(Half), []
    for model, micro_batch in ((whole, None), (parts, 4)):
        precision = Scaled()
        trained(model, loader(30, 10), plugins=[precision], micro_batch=micro_batch, gradient_clip_val=0.5)
        scales.append(precision.scaler.get_scale())
    assert scales == [512.0, 512.0]
    assert_same(whole, parts)
    assert all(value.isfinite().all() for value in parts.state_dict().values())


def test_skipped_parts_and_skipped_batches() -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 or batch[0][0, 0] > 0 else self.loss(batch)

    model, skipped = fresh(Skips), []
    note = LambdaCallback(on_train_batch_end=lambda *given: skipped.append(given[2]) if given[4] == 0 else None)
    with warned(UserWarning, fix="training_step"):
        trained(model, loader(40, 8), micro_batch=2, callbacks=[note])
    assert skipped == [{}]  # As without micro_batch.

    class Never(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with warned(UserWarning, fix="training_step"), refused(ValueError, says="2 batches"):
        trained(Never(), loader(8, 4), micro_batch=2)


def test_batch_norm_warns_once() -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(1, nn.BatchNorm1d(16))

    text = r"layers\.1 \(BatchNorm1d\) takes mean and variance of each micro-batch"
    with pytest.warns(UserWarning, match=text) as said:
        trained(Normed(), loader(8, 4), micro_batch=2, max_epochs=2)
    assert len([one for one in said if "micro_batch" in str(one.message)]) == 1


def test_manual_optimization_is_refused() -> None:
    with refused(ValueError, "micro_batch", fix="training_step"):
        trained(Manual(), loader(), micro_batch=2)


def test_a_batch_that_cannot_be_split_names_the_element() -> None:
    class Weights(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch["x"], batch["y"]))

    x, y = dataset(4)[:]
    with refused(ValueError, says=("batch['weights']", "is 2", "batch['x']", "is 4")):
        trained(Weights(), [{"x": x, "y": y, "weights": torch.ones(2)}], micro_batch="auto")
