"""A run that was interrupted in the middle of an epoch goes on with another number of processes."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import hasten as L
from hasten._lib.tree import is_sharded
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy, FSDPStrategy
from tests.models import Classifier, Numbered, quiet
from tests.programs import call_in_file

SAMPLES, BATCH = 24, 2
# The order of a sampler is drawn from torch's generator, which each of these runs seeds.
SEED = 11


class Sentences(Numbered):
    """Samples with a field of another length each."""

    def __getitem__(self, index: int) -> Any:
        x, y, number = super().__getitem__(index)
        return {"input_ids": [1] * (1 + 5 * index % 17), "x": x, "y": y, "number": number}


class Ids(IterableDataset[Any]):
    """The same samples for every process, as far as it knows."""

    def __iter__(self) -> Iterator[Any]:
        return map(Numbered(SAMPLES).__getitem__, range(SAMPLES))


class Positioned(Ids):
    """Saves its own position, which only the same part of the samples goes on from."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            self.place += 1
            yield Numbered(SAMPLES)[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if is_sharded(value) else value.clone()


class Recorded(Classifier):
    """Keeps the samples that it trains on, and what an epoch adds up to, by epoch."""

    def __init__(self, *, weighs: bool = False) -> None:
        super().__init__()
        self.weighs = weighs
        self.seen: dict[int, list[int]] = {}
        self.results: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.sum, self.numbers = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.correlation = torchmetrics.PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            batch = batch["x"], batch["y"], batch["number"]
        x, y, number = batch[0] if isinstance(batch[0], list) else batch
        self.seen.setdefault(self.current_epoch, []).extend(number.tolist())
        self.sum.update(number.double())
        self.numbers.update(number)
        self.correlation.update(x[:, 0], x[:, 1])
        size = len(number)
        self.log("mean", number.double().mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("total", size, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("most", number.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        loss = self.loss((x, y))
        return {"loss": loss, "loss_weight": size} if self.weighs else loss

    def on_train_epoch_end(self) -> None:
        values = {name: float(self.trainer.callback_metrics[name]) for name in ("mean", "most", "total")}
        values |= {"sum": float(self.sum.compute()), "samples": self.numbers.compute().numel()}
        self.results[self.current_epoch] = values
        self.weights[self.current_epoch] = {name: whole(value) for name, value in self.layers.state_dict().items()}
        for metric in (self.sum, self.numbers, self.correlation):
            metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twins(DDPStrategy):
    """All processes read the same data, as those of one tensor-parallel group do."""

    data_parallel_size, data_parallel_rank = 1, 0  # type: ignore[assignment]


STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "twins": Twins,
    "full": FSDPStrategy,
    "sharded": lambda: FSDPStrategy(state_dict_type="sharded"),
}


class Interrupt(L.Callback):
    """Save a checkpoint in an epoch once so many batches were read in this run, and stop."""

    def __init__(self, path: Path, epoch: int, batches: int) -> None:
        self.path, self.epoch, self.batches = path, epoch, batches

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.batches -= 1
            if not self.batches:
                trainer.save_checkpoint(self.path)
                trainer.should_stop = True


def loader(kind: str, batch_size: int = BATCH, samples: int = SAMPLES) -> Any:
    data = Numbered(samples)
    if kind in ("shuffled", "workers", "in sequence"):
        return DataLoader(data, batch_size, shuffle=kind != "in sequence", num_workers=2 * (kind == "workers"))
    if kind == "length":
        return DataLoader(Sentences(SAMPLES), batch_size, shuffle=True)
    if kind == "batches":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), batch_size, drop_last=False))
    if kind == "joined":
        return [loader("shuffled", batch_size), DataLoader(range(100, 116), batch_size)]  # type: ignore[arg-type]
    if kind == "weighted":
        return DataLoader(data, batch_size, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False))
    assert kind in ("iterable", "positioned")
    return DataLoader(Ids() if kind == "iterable" else Positioned(), batch_size)


KINDS = ("shuffled", "workers", "in sequence", "length", "batches", "joined", "weighted", "iterable", "positioned")
FEW, SOME = ("shuffled", "length"), ("shuffled", "batches", "joined", "iterable", "positioned")


def train(
    folder: Path, world: int, kind: str, chain: str, stage: int = 0, *, stops: bool, batch_size: int = BATCH,
    accumulate: int = 1,
    weighs: bool = False,
    strategy: str = "ddp",
    same: bool = False,
) -> None:  # fmt: skip
    """Train one stage of a chain of runs, each of which goes on where the one before was interrupted.

    It stops after so many batches of the second epoch, or not for 0.
    """
    L.seed_everything(SEED + stage, verbose=False)
    model, place = Recorded(weighs=weighs), folder / f"{kind}-{chain}"
    trainer = quiet(
        devices=world,
        strategy=STRATEGIES[strategy]() if world > 1 else "auto",
        max_epochs=3,
        callbacks=[Interrupt(Path(f"{place}-{stage}.ckpt"), 1, stops)] if stops else [],
        accumulate_grad_batches=accumulate,
        batching="length" if kind == "length" else None,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader(kind, batch_size), ckpt_path=f"{place}-{stage - 1}.ckpt" if stage else None)
    kept = {name: getattr(model, name) for name in ("seen", "results", "weights")}
    said = [str(each.message) for each in caught if "was written by" in str(each.message)]
    torch.save(
        {**kept, "said": said, "step": trainer.global_step}, f"{place}{'-same' * same}-{stage}-{trainer.global_rank}.pt"
    )
    trainer.strategy.barrier()


def train_all(folder: Path, world: int, runs: list[dict[str, Any]]) -> None:
    for run in runs:
        train(folder, world, **run)


def launch(folder: Path, world: int, runs: list[dict[str, Any]]) -> None:
    """Train in so many processes; one is this one."""
    if world == 1:
        train_all(folder, 1, runs)
        return
    strategy = DDPStrategy(start_method="forkserver")
    processes = runtime(accelerator="cpu", devices=world, strategy=strategy)
    processes.launch(call_in_file, __file__, "train_all", folder, world, runs)


def read(folder: Path, kind: str, chain: str, stage: int) -> list[Any]:
    return [torch.load(path) for path in sorted(folder.glob(f"{kind}-{chain}-{stage}-*.pt"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what all runs of this module have recorded."""
    folder = tmp_path_factory.mktemp("runs")

    def begun(kinds: tuple[str, ...], chain: str, stops: int = 4) -> list[dict[str, Any]]:
        return [{"kind": kind, "chain": chain, "stops": stops} for kind in kinds]

    def ended(kinds: tuple[str, ...], chain: str, stage: int = 1) -> list[dict[str, Any]]:
        return [{"kind": kind, "chain": chain, "stage": stage, "stops": 0} for kind in kinds]

    def large(stage: int, stops: int) -> list[dict[str, Any]]:
        """Accumulate three batches, of which one is open; weighed in one of the runs."""
        size = {"batch_size": 2 * BATCH if stage else BATCH}
        options = {"kind": "shuffled", "stage": stage, "stops": stops, "accumulate": 3, **size}
        found = [{**options, "chain": f"large-{name}", "strategy": name} for name in ("ddp", "full", "sharded")]
        return [*found, {**options, "chain": "large-weighed", "weighs": True}]

    one = {"kind": "shuffled", "stops": 0}
    twins = {**one, "strategy": "twins"}
    launch(folder, 3, begun(FEW, "3-1-2", 2))
    launch(folder, 2, [
        *begun(KINDS, "2-1"), *begun(("in sequence",), "2-1 end", 6), *begun(FEW, "2-3", 3),
        *large(0, 4), {**one, "chain": "whole", "accumulate": 3},
        {**twins, "chain": "twins-whole"}, {**twins, "chain": "twins-one", "stops": 4},
        {**twins, "chain": "twins-ddp", "stops": 4}, {**one, "chain": "twins-ddp", "stage": 1},
        *({**run, "batch_size": BATCH, "same": True} for run in large(1, 0)),
    ])  # fmt: skip
    launch(folder, 1, [
        *ended(KINDS, "2-1"), *ended(("in sequence",), "2-1 end"), *begun(("in sequence",), "1-2 end", 12),
        *begun(SOME, "1-2"), *({**run, "stage": 1} for run in begun(FEW, "3-1-2", 2)),
        *large(1, 0), {**one, "chain": "twins-one", "stage": 1},
    ])  # fmt: skip
    launch(folder, 2, [*ended(SOME, "1-2"), *ended(("in sequence",), "1-2 end"), *ended(FEW, "3-1-2", 2)])
    launch(folder, 3, ended(FEW, "2-3"))
    return folder


CHAINS = [(kind, "2-1") for kind in KINDS[:-1]] + [(kind, "1-2") for kind in SOME[:-1]]
CHAINS += [(kind, chain) for kind in FEW for chain in ("2-3", "3-1-2")]
# Interrupted after the last batch of the epoch: the run that goes on logs nothing in it.
CHAINS += [("in sequence", "1-2 end"), ("in sequence", "2-1 end")]


def test_every_sample_of_the_interrupted_epoch_is_trained_on_once(folder: Path) -> None:
    for kind, chain in (*CHAINS, ("shuffled", "large-ddp"), ("shuffled", "large-weighed")):
        stages = [read(folder, kind, chain, stage) for stage in range(max(2, len(chain.split("-"))))]
        seen = Counter(number for stage in stages for process in stage for number in process["seen"].get(1, []))
        assert seen == Counter(range(SAMPLES)), (kind, chain)
        # Later epochs are those of the new number of processes.
        after = Counter(number for process in stages[-1] for number in process["seen"][2])
        assert after == Counter(range(SAMPLES)), (kind, chain)


def test_what_an_epoch_has_gathered_is_that_of_all_processes(folder: Path) -> None:
    numbers = range(SAMPLES)
    expected = {"mean": sum(numbers) / SAMPLES, "most": max(numbers), "sum": sum(numbers), "samples": SAMPLES}
    expected["total"] = SAMPLES
    for kind, chain in CHAINS:
        *before, last = [read(folder, kind, chain, stage) for stage in range(len(chain.split("-")))]
        for process in last:
            for epoch in (1, 2):
                assert process["results"][epoch] == pytest.approx(expected), (kind, chain, epoch)
        # Pearson's correlation is computed from parts that cannot be added: fewer processes have no place for them.
        if chain == "3-1-2":
            assert "metrics ['correlation'] start again" in before[1][0]["said"][0]
        elif chain in ("2-1", "2-1 end"):
            (message,) = last[0]["said"]
            assert "by 2 process(es) that share the data and is resumed on 1: the metrics ['correlation']" in message
        else:
            assert not any(process["said"] for stage in (*before, last) for process in stage)


def test_an_order_that_is_not_known_is_said_to_begin_anew(folder: Path) -> None:
    message = read(folder, "positioned", "2-1", 1)[0]["said"][0]
    assert "the train_dataloader continues in a new order" in message
    assert "because it reads the IterableDataset Positioned, which keeps its position itself" in message
    ((rank_zero,), others) = [process["said"] for process in read(folder, "positioned", "1-2", 1)]
    assert "by 1 process(es)" in rank_zero
    assert not others


def test_the_same_batches_in_all_give_the_same_weights(folder: Path) -> None:
    """Two processes with two samples each, and one with four; the accumulation that was open is completed."""
    expected = read(folder, "shuffled", "whole", 0)[0]
    for how, same in itertools.product(("ddp", "weighed", "full", "sharded"), ("", "-same")):
        resumed = read(folder, "shuffled", f"large-{how}{same}", 1)[0]
        for name, value in expected["weights"][1].items():
            torch.testing.assert_close(resumed["weights"][1][name], value, rtol=0, atol=1e-6)
        assert resumed["step"] == expected["step"] == 6


def test_batches_count_as_in_an_epoch_of_the_new_size(tmp_path: Path) -> None:
    class Counting(Recorded):
        """Keeps the numbers of the batches of the second epoch, and after which of them validation ran."""

        def __init__(self) -> None:
            super().__init__()
            self.batches: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.batches.append("validation")

        def on_train_epoch_end(self) -> None: ...

    path, options = tmp_path / "a.ckpt", {"val_check_interval": 0.25, "num_sanity_val_steps": 0, "max_epochs": 2}
    validation = DataLoader(Numbered(2), 2)
    first, second = Counting(), Counting()
    quiet(**options, callbacks=[Interrupt(path, 1, 8)]).fit(first, loader("shuffled", 4, 48), validation)
    # 16 samples are left: four batches of ten. Validation runs after every second one, the sixth among them.
    quiet(**options, limit_train_batches=9).fit(second, loader("shuffled", 5, 48), validation, ckpt_path=path)
    assert second.batches == ["validation", 6, 7, "validation", 8]
    seen = first.seen[1] + second.seen[1]
    assert len(seen) == len(set(seen)) == 32 + 15


def test_processes_that_read_the_same_data_count_as_one(folder: Path) -> None:
    whole, begun, other = (read(folder, "shuffled", f"twins-{name}", 0)[0] for name in ("whole", "one", "ddp"))
    one, ddp = read(folder, "shuffled", "twins-one", 1)[0], read(folder, "shuffled", "twins-ddp", 1)
    # For one process with the same share nothing has changed.
    assert begun["seen"][1] + one["seen"][1] == whole["seen"][1]
    assert one["seen"][2] == whole["seen"][2]
    for name, value in whole["weights"][2].items():
        torch.testing.assert_close(one["weights"][2][name], value, rtol=0, atol=1e-6)
    # Each of as many processes reads half of the rest where all read the whole before.
    seen = Counter(number for each in (other, *ddp) for number in each["seen"][1])
    assert (seen, [len(each["seen"][1]) for each in ddp]) == (Counter(range(SAMPLES)), [8, 8])
