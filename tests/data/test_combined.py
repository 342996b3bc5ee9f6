"""Several loaders read as one: every mode, plain and as the stream of a run that resumes exactly."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hasten as L
from hasten._lib.errors import MisconfigurationException
from hasten.data import CombinedLoader
from hasten.data.resume.stream import CombinedStream, Stream
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


def flat(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: flat(value) for key, value in batch.items()}
    return [flat(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def numbers(first: int, count: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(first, first + count), batch_size, **options)  # type: ignore[arg-type]


class Begun:
    """Counts how often it is begun."""

    times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return iter(())


class Unsized(IterableDataset[int]):
    def __init__(self, first: int, count: int) -> None:
        self.values = range(first, first + count)

    def __iter__(self) -> Any:
        return iter(self.values)


EXPECTED = {
    "min_size": [{"a": [0, 1], "b": [10, 11]}, {"a": [2, 3], "b": [12]}],
    "max_size": [
        {"a": [0, 1], "b": [10, 11]},
        {"a": [2, 3], "b": [12]},
        {"a": [4, 5], "b": None},
        {"a": [6], "b": None},
    ],
    "max_size_cycle": [
        {"a": [0, 1], "b": [10, 11]},
        {"a": [2, 3], "b": [12]},
        {"a": [4, 5], "b": [10, 11]},
        {"a": [6], "b": [12]},
    ],
    "sequential": [[0, 1], [2, 3], [4, 5], [6], [10, 11], [12]],
}


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("mode", EXPECTED)
def test_each_mode(mode: str, sized: bool) -> None:
    def make() -> dict[str, Any]:
        if sized:
            return {"a": numbers(0, 7), "b": numbers(10, 3)}
        return {"a": DataLoader(Unsized(0, 7), 2), "b": DataLoader(Unsized(10, 3), 2)}

    combined = CombinedLoader(make(), mode)
    seen = list(combined)
    assert [flat(batch) for batch, _, _ in seen] == EXPECTED[mode]
    if mode == "sequential":
        assert [(i, j) for _, i, j in seen] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    else:
        assert [(i, j) for _, i, j in seen] == [(i, 0) for i in range(len(seen))]
    if sized:
        assert len(combined) == len(EXPECTED[mode])
    else:
        with refused(NotImplementedError, says="CombinedLoader"):
            len(combined)
    assert len(list(combined)) == len(seen)

    stream = stream_of(CombinedLoader(make(), mode))
    assert stream.length == (len(EXPECTED[mode]) if sized else None)
    for _ in range(2):
        batches = list(stream.batches())
        assert [flat(batch) for batch, _ in batches] == EXPECTED[mode]
        assert [is_last for _, is_last in batches] == [False] * (len(batches) - 1) + [True]
    assert len(list(stream.batches(limit=2))) == 2
    assert [is_last for _, is_last in stream.batches(limit=1)] == [True]


@pytest.mark.parametrize(("unsized", "batches"), [(20, 3), (3, 2)])
def test_the_shortest_loader_may_have_no_length(unsized: int, batches: int) -> None:
    combined = CombinedLoader([range(3), DataLoader(Unsized(0, unsized), 2)])
    stream = stream_of(combined)
    assert (len(combined), stream.length, stream.certain_length) == (3, 3, None)
    assert [is_last for _, is_last in stream.batches()] == [False] * (batches - 1) + [True]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_structure_is_kept() -> None:
    combined = CombinedLoader(Pair([numbers(0, 2), numbers(4, 2)], {"x": numbers(8, 2)}))
    ((batch, _, _),) = list(combined)
    assert isinstance(batch, Pair)
    assert flat(batch.left) == [[0, 1], [4, 5]]
    assert flat(batch.right) == {"x": [8, 9]}
    assert [len(leaf.dataset) for leaf in combined.flattened] == [2, 2, 2]
    given = OrderedDict(b=numbers(0, 2), a=numbers(4, 2))
    assert CombinedLoader(given).iterables is given
    assert isinstance(next(CombinedLoader(given))[0], OrderedDict)
    assert isinstance(combined.iterables, Pair)
    assert type(combined.sampler.right["x"]).__name__ == "SequentialSampler"
    combined.flattened = [numbers(0, 1)] * 3
    assert flat(next(iter(combined))[0].left) == [[0], [0]]
    with refused(ValueError, says=("2 loaders", "are 3")):
        combined.flattened = [1, 2]


def test_lists_of_batches_and_limits() -> None:
    assert CombinedLoader([[1, 2, 3], range(2)], "max_size").flattened == [[[1, 2, 3], range(2)]]
    assert CombinedLoader([DataLoader([1, 2, 3]), [7, 8]], "sequential").flattened[1] == [7, 8]
    assert [batch for batch, _, _ in CombinedLoader({"a": [1, 2], "b": [3, 4]})] == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    combined = CombinedLoader([range(5), range(5)], "sequential")
    combined.limits = [1, 2]
    assert [batch for batch, _, _ in combined] == [0, 0, 1]
    assert len(combined) == 3
    combined.limits = 1
    assert [batch for batch, _, _ in combined] == [0, 0]
    with refused(ValueError, says=("1 limits", "2 loaders")):
        combined.limits = [1]
    for mode, length in (("min_size", 1), ("max_size", 2), ("max_size_cycle", 2)):
        combined = CombinedLoader([range(2), range(3)], mode)
        combined.limits = [1, 2]
        assert len(combined) == length
    # No batch more is fetched, and a loader without one is not begun.
    begun = Begun()
    batches = iter(range(5))
    combined = CombinedLoader([begun, batches, range(2)], "sequential")
    combined.limits = [0, 2, math.inf]
    assert [batch for batch, _, _ in combined] == [0, 1, 0, 1]
    assert (begun.times, next(batches)) == (0, 2)


# -- exact resume


def stream_of(combined: CombinedLoader) -> CombinedStream:
    return CombinedStream(combined, [Stream(leaf) for leaf in combined.flattened])


def shuffled(mode: str, workers: int) -> CombinedStream:
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers}
    own = torch.Generator().manual_seed(3)
    parts = [numbers(0, 9, **options), numbers(20, 5, **options, generator=own), DataLoader(Unsized(40, 6), 2)]
    return stream_of(CombinedLoader(parts, mode))


@pytest.mark.parametrize(
    ("mode", "limit", "workers", "every"),
    [*((mode, limit, 0, 1) for mode in EXPECTED for limit in (None, 2)), ("max_size_cycle", None, 1, 7)],
)
def test_resumed_anywhere_it_goes_on_as_if_nothing_happened(
    mode: str, limit: int | None, workers: int, every: int
) -> None:
    torch.manual_seed(0)
    stream = shuffled(mode, workers)
    seen, places = [], []
    for epoch in range(2):
        stream.set_epoch(epoch)
        for number, (batch, is_last) in enumerate(stream.batches(limit)):
            draw = float(torch.rand(()))
            before = (len(seen), stream.state_dict(number), torch.get_rng_state(), draw)
            seen.append((flat(batch), is_last, draw))
            after = (len(seen), stream.state_dict(number + 1), torch.get_rng_state(), None)
            places += [before, after]
        places.append((len(seen), stream.state_dict(number + 1), torch.get_rng_state(), None))
    for count, state, rng, again in places[::every]:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        torch.manual_seed(99)
        other = shuffled(mode, workers)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        other.open()
        torch.set_rng_state(rng)
        rest: list[Any] = []
        while len(rest) < len(seen) - count:
            for batch, is_last in other.batches(limit):
                draw = float(torch.rand(())) if again is None or rest else again
                rest.append((flat(batch), is_last, draw))
        assert rest == seen[count:], (mode, limit, count, again)


def test_state_of_other_loaders_is_refused() -> None:
    state = stream_of(CombinedLoader([range(3), range(4)])).state_dict(0)
    with refused(ValueError, "train_dataloader", says="2 loader"):
        stream_of(CombinedLoader([range(3)] * 3)).load_state_dict(state)


def test_start_at_skips_in_every_loader() -> None:
    expected = {
        "min_size": [[3, 13]],
        "max_size": [[3, 13], [4, None]],
        "max_size_cycle": [[3, 13], [4, 10]],
        "sequential": [3, 4, 10, 11, 12, 13],
    }
    for mode, rest in expected.items():
        stream = stream_of(CombinedLoader([range(5), range(10, 14)], mode))
        stream.start_at(3)
        assert stream.position == 3
        assert [batch for batch, _ in stream.batches()] == rest, mode


# -- through the Trainer


class TwoSources(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch_idx, len(batch["a"][0]), len(batch["b"][0])))
        return sum(nn.functional.cross_entropy(self.layer(x), y) for x, y in batch.values())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_training_on_a_dict_of_loaders_cycles_the_shorter_as_a_plain_loop_does_also_when_resumed(tmp_path: Any) -> None:
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    data = {"a": loader(20), "b": loader(8)}
    model, plain = TwoSources(), nn.Linear(8, 2)
    plain.load_state_dict(model.layer.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = quiet(max_epochs=2, callbacks=Stops())
    trainer.fit(model, data)
    for _ in range(2):
        for (x, y), (v, w) in zip(loader(20), [*loader(8), *loader(8), *loader(8)], strict=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y) + nn.functional.cross_entropy(plain(v), w)
            loss.backward()
            optimizer.step()
    assert same_weights(plain, model.layer)
    assert trainer.num_training_batches == 5
    assert set(trainer.train_dataloader) == {"a", "b"}
    resumed = TwoSources()
    quiet(max_epochs=2).fit(resumed, data, ckpt_path=tmp_path / "middle.ckpt")
    assert len(resumed.seen) == len(model.seen) - 7
    assert same_weights(plain, resumed.layer)


def test_training_with_a_limit_and_other_modes() -> None:
    for limit, mode, expected in ((3, "min_size", 2), (0.5, "max_size_cycle", 2)):
        trainer, model = quiet(limit_train_batches=limit), TwoSources()
        trainer.fit(model, CombinedLoader({"a": loader(20), "b": loader(8)}, mode))  # type: ignore[arg-type]
        assert model.seen == [(index, 4, 4) for index in range(expected)]
        assert trainer.num_training_batches == expected
    with refused(MisconfigurationException, fix="min_size"):
        quiet().fit(Classifier(), CombinedLoader([loader(20), loader(8)], "sequential"))


class Evaluated(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((flat(batch), batch_idx, dataloader_idx))


def test_validation_modes() -> None:
    parts = {"a": range(2), "b": range(10, 13)}
    trainer = quiet(barebones=False)
    trainer.validate(model := Evaluated(), parts, verbose=False)
    assert model.seen == [(0, 0, 0), (1, 1, 0), (10, 0, 1), (11, 1, 1), (12, 2, 1)]
    trainer.validate(model := Evaluated(), CombinedLoader(parts, "sequential"), verbose=False)
    assert [place[1:] for place in model.seen] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
    trainer.validate(model := Evaluated(), CombinedLoader(parts, "max_size"), verbose=False)
    assert model.seen == [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0), ({"a": None, "b": 12}, 2, 0)]
    with pytest.raises(ValueError, match=r"prediction reads one loader after the other.*sequential"):
        trainer.predict(model, CombinedLoader(parts, "min_size"))


@pytest.mark.parametrize("mode", ["min_size", "sequential"])
def test_copied_and_pickled_during_an_iteration(mode: Any) -> None:
    loader = CombinedLoader({"a": range(3), "b": [range(2), range(3)]}, mode)
    # A loader that alone would be two of them keeps its place.
    loader.flattened = [range(3), [range(5), range(6)], range(3)]
    batches = list(loader)
    next(iter(loader))
    for same in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert list(same) == batches


def test_a_cycle_ends_when_a_loader_has_no_further_batch() -> None:
    assert list(CombinedLoader([[], [1]], "max_size_cycle")) == []
    assert list(CombinedLoader([iter([1]), range(3)], "max_size_cycle")) == [([1, 0], 0, 0)]
