"""An error of torch says which layer raised it, what the layer was given, and the line that usually mends it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hasten as L
from tests.models import quiet
from tests.refusals import refused


class Samples(Dataset[Any]):
    """Four samples, made by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Net(L.LightningModule):
    def __init__(self, net: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.step = net, step
        self.weight = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self, batch)

    test_step = validation_step
    predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pair(index: int) -> Any:
    return torch.ones(4), index % 3


def loader(make: Callable[[int], Any] = pair, **options: Any) -> Any:
    return DataLoader(Samples(make), 2, **options)


def entropy(self: Any, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(self.net(x), y)


def squared(self: Any, batch: Any) -> Any:
    x, y = batch
    return F.mse_loss(self.net(x), y)


def through(self: Any, batch: Any) -> Any:
    return self.net(batch[0]).sum()


def in_place(self: Any, batch: Any) -> Any:
    hidden = torch.sigmoid(self.net(batch[0]))
    hidden += 1
    return hidden.square().sum()


def takes_three(self: Any, batch: Any) -> Any:
    _x, _y, _z = batch


def takes_two(self: Any, batch: Any) -> Any:
    x, _y = batch
    return self.net(x).sum()


def channels_from_shape(self: Any, batch: Any) -> Any:
    _batch, _channels, _height, _width = batch[0].shape


def backward_twice(self: Any, batch: Any) -> Any:
    loss = through(self, batch)
    loss.backward()
    return loss


def images(*size: int, dtype: Any = torch.float32) -> Callable[[int], Any]:
    return lambda index: (torch.ones(*size, dtype=dtype), index % 3)


def named(index: int) -> Any:
    return {"image": torch.ones(4), "label": index % 3}


def deep() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Identity(), nn.ReLU(), nn.Linear(100, 3))


def linear() -> nn.Module:
    return nn.Linear(4, 3)


# The layers, the step, a sample, the kind of the error and what its notes say.
ERRORS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[int], Any], type, list[str]]] = {
    "features": (deep, through, images(144), RuntimeError,
        ["net.3 Linear(100, 3) got 144 features: Tensor (2, 144) float32.", "nn.Linear(144, 3)"]),
    "64-bit inputs": (linear, through, images(4, dtype=torch.float64), RuntimeError,
        ["net Linear(4, 3) got Tensor (2, 4) float64.", "Use x.float() in the dataset"]),
    "whole numbers": (linear, through, images(4, dtype=torch.int64), RuntimeError, ["Use x.float()"]),
    "bytes": (lambda: nn.Conv2d(3, 8, 3), through, images(3, 8, 8, dtype=torch.uint8), RuntimeError,
        ["Use x.float() / 255"]),
    "labels as floats": (linear, lambda self, batch: F.cross_entropy(self.net(batch[0]), batch[1].float()), pair,
        RuntimeError, ["Use y.long() for labels of classes"]),
    "weights of classes": (linear,
        lambda self, batch: F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.tensor([1, 2, 3])), pair,
        RuntimeError, ["weight.to(scores.dtype)", "int64"]),
    "labels in a list": (linear, entropy, lambda index: (torch.ones(4), [0, 1, 0]), TypeError,
        ["torch.tensor(labels)"]),
    "batches of batches": (linear, lambda self, batch: F.cross_entropy(self.net(batch[0][None]), batch[1][None]), pair,
        RuntimeError, ["batch_sampler="]),
    "numpy and 16 bits": (linear, lambda self, batch: self.net(batch[0]).detach().bfloat16().numpy(), pair, TypeError,
        [".float() before .numpy()"]),
    "labels in a column": (linear, lambda self, batch: F.cross_entropy(self.net(batch[0]), batch[1][:, None]), pair,
        RuntimeError, ["Use y.squeeze(1)"]),
    "one-hot labels": (
        linear, lambda self, batch: F.cross_entropy(self.net(batch[0]), F.one_hot(batch[1], 3)), pair, RuntimeError,
        ["Use y.float()"]),
    "labels for a binary loss": (lambda: nn.Linear(4, 1),
        lambda self, batch: F.binary_cross_entropy(self.net(batch[0]).sigmoid().squeeze(1), batch[1]), pair,
        RuntimeError, ["y.float()"]),
    "labels out of range": (lambda: nn.Linear(4, 2), entropy, lambda index: (torch.ones(4), index + 1), IndexError,
        ["The scores have 2 classes, so labels go from 0 to 1, and these are 1 to 2."]),
    "indices out of range": (lambda: nn.Embedding(2, 4), through, lambda index: (torch.tensor([index + 1]), 0),
        IndexError, ["net Embedding(2, 4) got", "indices go from 0 to 1, and these are 1 to 2."]),
    "indices as floats": (lambda: nn.Embedding(2, 4), through, pair, RuntimeError, ["Use x.long()"]),
    "tuple by name": (linear, lambda self, batch: self.net(batch["image"]), pair, TypeError,
        ["The batch is a list of 2, not a dict: write x, y = batch"]),
    "dict by number": (linear, lambda self, batch: self.net(batch[0]), named, KeyError,
        ["The batch is a dict with 'image', 'label'. Write batch['image']."]),
    "dict by a wrong name": (linear, lambda self, batch: self.net(batch["imgae"]), named, KeyError,
        ["Did you mean 'image'?"]),
    "dict unpacked": (linear, takes_two, named, TypeError,
        ["Write image, label = batch['image'], batch['label']."]),
    "whole batch": (linear, lambda self, batch: self.net(batch), pair, TypeError, ["unpack it, x, y = batch"]),
    "whole batch for a convolution": (lambda: nn.Conv2d(3, 8, 3), lambda self, batch: self.net(batch), pair, TypeError,
        ["unpack it, x, y = batch. A step gets batch and batch_idx"]),
    "in place": (linear, in_place, pair, RuntimeError, ["Write x = x + y in place of x += y"]),
    "two devices": (linear, lambda self, batch: self.net(batch[0]) + torch.ones(3, device="meta"), pair, RuntimeError,
        ["device=self.device"]),
    "three of two": (linear, takes_three, pair, ValueError, ["than the dataset gives: 3 instead of 2."]),
    "two of one tensor": (linear, takes_three, lambda index: torch.ones(4), ValueError, ["The batch is one tensor"]),
    "four of a shape": (linear, channels_from_shape, pair, ValueError, ["does not have 4 dimensions"]),
    "backward twice": (linear, backward_twice, pair, RuntimeError, ["Detach what you carry over"]),
    "no gradient": (linear, lambda self, batch: through(self, batch).detach(), pair, RuntimeError, [".detach()"]),
    "several losses": (linear, lambda self, batch: self.net(batch[0]), pair, RuntimeError, ["loss.mean()"]),
    "shape of the target": (lambda: nn.Linear(4, 1),
        lambda self, batch: F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1].float()), pair, ValueError,
        ["by .squeeze(1) or .unsqueeze(1): [2, 1] and [2]."]),
    "broadcast": (linear, lambda self, batch: F.mse_loss(self.net(batch[0]), batch[1].float()), pair, RuntimeError,
        ["prediction and target one shape", "(2, 3) and (2,)"]),
    "channels": (lambda: nn.Conv2d(3, 8, 3), through, images(1, 8, 8), RuntimeError,
        ["net Conv2d(3, 8) got Tensor (2, 1, 8, 8) float32.", "nn.Conv2d(1, ...)"]),
    "channels last": (lambda: nn.Conv2d(3, 8, 3), through, images(8, 8, 3), RuntimeError, ["x.permute(0, 3, 1, 2)"]),
    "flat images": (lambda: nn.Conv2d(3, 8, 3), through, images(192), RuntimeError,
        ["x.view(len(x), channels, height, width)"]),
    "norm of one value": (lambda: nn.BatchNorm1d(4), lambda self, batch: self.net(batch[0][:1]).sum(), pair, ValueError,
        ["net BatchNorm1d(4) got Tensor (1, 4) float32.", "drop_last=True"]),
    "norm of other channels": (lambda: nn.BatchNorm1d(5), through, pair, RuntimeError, ["nn.BatchNorm1d(4)"]),
    "several outputs": (lambda: nn.LSTM(4, 4), lambda self, batch: self.net(batch[0]).mean(), pair, AttributeError,
        ["unpack them first"]),
}  # fmt: skip


def notes_of(run: Callable[[], Any], kind: type = RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        run()
    assert type(caught.value) is kind
    assert any(Path(frame.filename) == Path(__file__) for frame in traceback.extract_tb(caught.value.__traceback__)[1:])
    notes = getattr(caught.value, "__notes__", [])
    assert len(set(notes)) == len(notes)
    return "\n".join(notes)


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_a_step_says_the_layer_and_the_fix(name: str) -> None:
    make_net, step, sample, kind, said = ERRORS[name]
    notes = notes_of(lambda: quiet(limit_val_batches=0).fit(Net(make_net(), step), loader(sample)), kind)
    for text in said:
        assert text in notes


@pytest.mark.parametrize("name", ["features", "dict by number", "channels"])
def test_check_gives_the_same_fix(name: str) -> None:
    make_net, step, sample, _kind, said = ERRORS[name]
    report = quiet(limit_val_batches=0).check(Net(make_net(), step), loader(sample))
    (row,) = [row for row in report.rows if row.name == "training_step"]
    for text in said:
        assert text.removesuffix(".") in f"{row.seen} {row.line}"


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_other_loops_say_it_as_well(call: str) -> None:
    notes = notes_of(lambda: getattr(quiet(), call)(Net(deep(), through), loader(images(144))))
    assert "net.3 Linear(100, 3) got 144 features" in notes


def test_the_module_that_fabric_wraps_says_it_as_well() -> None:
    fabric = L.Fabric(accelerator="cpu")
    model = fabric.setup(deep())
    assert "3 Linear(100, 3) got 144 features" in notes_of(lambda: model(torch.ones(2, 144)))


def test_a_run_of_two_processes_says_it_as_well() -> None:
    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp_fork", limit_val_batches=0)
    with refused(RuntimeError, says=("mat1", "mat2")) as caught:
        trainer.fit(Net(deep(), through), loader(images(144)))
    notes = "\n".join(caught.value.__notes__)
    assert "\nnet.3 Linear(100, 3) got 144 features" in notes
    assert "nn.Linear(144, 3)" in notes


def test_a_block_of_the_program_is_named_with_what_it_was_given() -> None:
    class Block(nn.Module):
        def forward(self, x: Any) -> Any:
            x = x.flatten()
            return x.view(7)

    notes = notes_of(lambda: quiet(limit_val_batches=0).fit(Net(nn.Sequential(Block()), through), loader()))
    assert "net.0 Block got Tensor (2, 4) float32." in notes
    assert "x.flatten(1)" in notes


def ragged(index: int) -> Any:
    return torch.ones(index + 1), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_sizes(workers: int) -> None:
    data = DataLoader(Samples(ragged), 2, num_workers=workers)
    with pytest.raises(RuntimeError, match="equal size") as caught:
        quiet(limit_val_batches=0).fit(Net(linear(), through), data)
    assert "Write DataLoader(..., collate_fn=...), with a function that pads them" in "\n".join(caught.value.__notes__)


def test_a_tensor_given_in_place_of_a_loader() -> None:
    net = Net(linear(), lambda self, batch: self.net(next(iter(batch))))
    notes = notes_of(lambda: quiet(limit_val_batches=0).fit(net, torch.arange(4)), TypeError)
    assert "Give DataLoader(TensorDataset(x, y), batch_size=32)." in notes


def test_a_lambda_for_the_workers() -> None:
    data = loader(lambda index: pair(index), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(Exception, match="lambda") as caught:
        quiet(limit_val_batches=0).fit(Net(linear(), through), data)
    assert "Define it by def at the top of a file" in "\n".join(caught.value.__notes__)


def test_an_error_that_is_not_of_torch_gets_no_fix() -> None:
    def fails(self: Any, batch: Any) -> Any:
        raise KeyError("nothing of the batch")

    notes = notes_of(lambda: quiet(limit_val_batches=0).fit(Net(linear(), fails), loader()), KeyError)
    assert notes == "in Net.training_step, batch 0: list of 2 (Tensor (2, 4) float32, Tensor (2,) int64)"
