"""Which elements of a batch run over samples: shown by the data, said by the user, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import hasten as L
from hasten.data import MicroBatch
from tests.loops.test_micro_batches import Stream, assert_same, fresh
from tests.loops.test_retried_steps import pairs
from tests.models import Classifier, dataset, quiet
from tests.refusals import refused

SIZE = 8
WEIGHTS = torch.linspace(0.5, 2.0, SIZE)
TABLE = torch.linspace(-1, 1, SIZE * 8).view(SIZE, 8)


class Eight(Classifier):
    """Uses as many class weights, and as long a table, as a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, SIZE))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch["x"] @ batch["table"].T)
        # A mean over samples, so that parts are the whole.
        return (nn.functional.cross_entropy(scores, batch["y"], reduction="none") * batch["w"][batch["y"]]).mean()


def with_weights(samples: list[Any]) -> dict[str, Any]:
    x, y = pairs(samples)
    return {"x": x, "y": y, "w": WEIGHTS.clone(), "table": TABLE.clone()}


def trained(kind: type[Any], data: Any, **arguments: Any) -> Any:
    model = fresh(kind)
    L.seed_everything(1, verbose=False)
    quiet(**arguments).fit(model, data)
    return model


def assert_alike(kind: type[Any], data: Callable[[], Any], micro_batch: Any) -> None:
    assert_same(trained(kind, data()), trained(kind, data(), micro_batch=micro_batch))


# Of 36 samples the last batch is smaller: fields that have as many rows in it, or in all others, are the same.
@pytest.mark.parametrize(("samples", "workers", "micro_batch"), [(40, 0, 2), (40, 1, 2), (36, 0, 3)])
def test_a_field_that_merely_has_as_many_rows_goes_to_every_part(samples: int, workers: int, micro_batch: int) -> None:
    options: dict[str, Any] = {"collate_fn": with_weights, "num_workers": workers}
    assert_alike(Eight, lambda: DataLoader(dataset(samples), SIZE, **options), micro_batch)


@pytest.mark.parametrize(
    ("extra", "fact"),
    [
        (lambda x: x @ x.T, "batch['more']"),
        (lambda x: x.T.contiguous(), "batch['more']"),
        (
            lambda x: torch.zeros(8 if len(x) == 8 else len(x) * 3 + 1, 2),
            "batch['more']",
        ),
        (lambda x: Boxes(x), "batch['more']"),
        (lambda x: {1: Boxes(x)}, "batch['more'][1]"),
    ],
    ids=["pairs", "second-dimension", "neither", "object", "object-inside"],
)
def test_what_cannot_be_split_is_named_before_the_first_step(extra: Callable[[Tensor], Any], fact: str) -> None:
    class Never(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("the step ran")

    def join(samples: list[Any]) -> dict[str, Any]:
        x, y = pairs(samples)
        return {"x": x, "y": y, "more": extra(x)}

    with refused(ValueError, says=fact):
        trained(Never, DataLoader(dataset(40), SIZE, collate_fn=join), micro_batch="auto")


class Boxes:
    def __init__(self, x: Tensor) -> None:
        self.corners = x


def test_images_of_one_size_in_lists_are_samples_and_their_channels_are_not() -> None:
    class Lists(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels = batch
            sizes.append(len(images))
            return self.loss((torch.stack(images).mean((2, 3)).repeat(1, 4)[:, :8], torch.stack(labels)))

    data = [(torch.randn(3, 2, 2), torch.tensor(index % 2)) for index in range(12)]

    def loader() -> Any:
        return DataLoader(data, 6, collate_fn=lambda samples: tuple(map(list, zip(*samples, strict=True))))

    sizes: list[int] = []
    whole = trained(Lists, loader())
    sizes.clear()
    assert_same(whole, trained(Lists, loader(), micro_batch=4))
    assert sizes == [4, 2, 4, 2]


class Adds(Classifier):
    """A hook adds what belongs to all samples."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1], "shift": torch.linspace(0, 1, SIZE)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["x"] + batch["shift"], batch["y"]))


def test_what_a_hook_adds_has_to_be_said() -> None:
    data = DataLoader(dataset(40), SIZE)
    with refused(ValueError, "micro_batch", says="MicroBatch(size"):
        trained(Adds, data, micro_batch="auto")
    assert_alike(Adds, lambda: data, MicroBatch(2, shared=["shift"]))


def test_a_stream_with_a_function_of_its_own_has_to_be_said() -> None:
    data = DataLoader(Stream(40), SIZE, collate_fn=with_weights)
    with refused(ValueError, "micro_batch", says="batch['x']"):
        trained(Eight, data, micro_batch=2)
    assert_alike(Eight, lambda: data, MicroBatch(2, shared=("w", "table")))
    # Without such fields: everything runs over samples.
    simple = DataLoader(Stream(40), 5, collate_fn=pairs)
    assert_alike(Classifier, lambda: simple, 3)


def test_positions_can_be_named() -> None:
    class Three(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((batch[0] + batch[2], batch[1]))

    data = [[*dataset(40)[start : start + 8], torch.linspace(0, 1, 8)] for start in range(0, 40, 8)]
    with refused(ValueError, "micro_batch", says="batch[0]"):
        trained(Three, data, micro_batch=3)
    assert_alike(Three, lambda: data, MicroBatch(3, shared=[2]))


class Noisy(Dataset[Any]):
    """Draws from its own generators."""

    def __init__(self) -> None:
        self.random, self.torch = random.Random(0), torch.Generator().manual_seed(0)
        self.data = dataset(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x * self.random.random() + torch.rand(8, generator=self.torch) + torch.rand(8), y


def test_looking_at_samples_restores_the_generators_of_the_dataset() -> None:
    def data() -> Any:
        return DataLoader(Subset(Noisy(), range(32)), SIZE, shuffle=True, collate_fn=pairs)

    assert_alike(Classifier, data, 4)


def test_a_loader_that_yields_something_else_is_not_believed() -> None:
    class Adding(DataLoader[Any]):
        def __iter__(self) -> Any:
            for x, y in super().__iter__():
                yield {"x": x, "y": y, "shift": torch.linspace(0, 1, SIZE)}

    with refused(ValueError, "micro_batch"):
        trained(Eight, Adding(dataset(40), SIZE), micro_batch=2)


def test_joined_loaders() -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["plain"]) + super().loss(
                (batch["own"]["x"] + batch["own"]["shift"], batch["own"]["y"])
            )

    def own(samples: list[Any]) -> dict[str, Any]:
        x, y = pairs(samples)
        return {"x": x, "y": y, "shift": torch.linspace(0, 1, SIZE)}

    def data() -> Any:
        return {"plain": DataLoader(dataset(40), SIZE), "own": DataLoader(dataset(40, seed=1), SIZE, collate_fn=own)}

    assert_alike(Two, data, 3)
