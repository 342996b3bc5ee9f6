"""Micro-batches where memory runs out: the step is begun again with fewer samples, as if it always had been so."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.strategies import DDPStrategy
from tests.loops.test_micro_batches import assert_same, fresh, trained
from tests.models import Attempts, Classifier, loader, quiet
from tests.refusals import warned


class Limited(Classifier):
    """Memory runs out in a batch of more than ``fits`` samples, in forward or in backward."""

    sizes = Attempts()

    def __init__(self, fits: int = 4, where: str = "forward", **options: Any) -> None:
        super().__init__(**options)
        self.fits, self.where = fits, where

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if self.training and len(x) > self.fits:
            if self.where == "forward":
                super().forward(x)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if self.where == "host":
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
            # The gradients of the last layer are there already.
            return self.layers[3](Explodes.apply(self.layers[:3](x)))
        return super().forward(x)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("where", ["forward", "backward", "host"])
def test_memory_that_runs_out_leaves_no_trace(where: str, caplog: pytest.LogCaptureFixture) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Logs(Limited):
        def __init__(self, **options: Any) -> None:
            super().__init__(dropout=0.5, **options)
            self.layers.insert(1, nn.BatchNorm1d(16))
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(batch[0].mean())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
            self.log("drawn", random.random() + numpy.random.rand() + torch.rand(()), on_epoch=True)
            self.log("early", batch[0].mean(), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def forward(self, x: Tensor) -> Tensor:
            if self.where == "backward" and self.training and len(x) > self.fits:
                self.sizes.append(len(x))
                return self.layers[4](Explodes.apply(self.layers[:4](x)))
            return super().forward(x)

    numpy = pytest.importorskip("numpy")
    models, values = [], []
    for micro_batch in (5, "auto"):
        L.seed_everything(1, verbose=False)
        models.append(fresh(Logs, fits=5, where=where))
        with caplog.at_level("INFO"), warned(UserWarning, says="BatchNorm1d"):
            trainer = trained(
                models[-1], loader(60, 20), micro_batch=micro_batch, max_epochs=2, accumulate_grad_batches=2
            )
        values.append({k: v.item() for k, v in trainer.callback_metrics.items()})
    fixed, found = models
    for name, value in fixed.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name
    assert values[0] == values[1]
    # 20, 10 and 5 in the first step, and never more than 5 again.
    assert found.sizes[:3] == [20, 10, 5]
    assert max(found.sizes[2:]) == 5
    said = [record.message for record in caplog.records if "Memory ran out" in record.message]
    assert said == [
        "Memory ran out, and the step was begun again. From here on: 5 samples at once (micro_batch='auto')."
    ]


def test_memory_that_runs_out_in_the_middle_of_an_accumulation() -> None:
    class Later(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.fits = 5 if batch_idx >= 1 else 100
            return super().training_step(batch, batch_idx)

    whole, found = fresh(), fresh(Later, where="backward")
    trained(whole, loader(40, 10), accumulate_grad_batches=4)
    trained(found, loader(40, 10), accumulate_grad_batches=4, micro_batch="auto")
    assert found.sizes[:3] == [10, 10, 5]
    assert_same(whole, found)


class Wrong(Limited):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize(
    ("kind", "fits", "lever", "sizes", "note"),
    [
        (Limited, 0, "auto", [4, 2, 1], "(samples at once: 1). Add memory='auto'"),
        (Limited, 2, None, [4], "Trainer(micro_batch='auto')"),
        (Wrong, 4, "auto", [], "in Wrong.training_step, batch 0"),
    ],
)
def test_errors_that_end_the_training_have_a_note(
    kind: Any, fits: int, lever: Any, sizes: list[int], note: str
) -> None:
    model = fresh(kind, fits=fits)
    with pytest.raises(RuntimeError, match=r"out of memory|mat1 and mat2") as caught:
        trained(model, loader(), micro_batch=lever)
    assert model.sizes == sizes
    assert any(note in each for each in caught.value.__notes__)


def test_a_resumed_run_goes_on_with_the_size_found(tmp_path: Any) -> None:
    straight = fresh(Limited, fits=5, dropout=0.5)
    trained(straight, loader(60, 20, shuffle=True), micro_batch="auto", max_epochs=2)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
                trainer.should_stop = True

    half, resumed = (fresh(Limited, fits=5, dropout=0.5) for _ in range(2))
    trained(half, loader(60, 20, shuffle=True), micro_batch="auto", callbacks=[Save()])
    options = {"ckpt_path": tmp_path / "mid.ckpt"}
    quiet(micro_batch="auto", max_epochs=2).fit(resumed, loader(60, 20, shuffle=True), **options)
    assert max(resumed.sizes) == 5
    assert_same(straight, resumed, atol=0)
    # The same file without the speed-up.
    plain = fresh(Limited, fits=20, dropout=0.5)
    quiet(max_epochs=2).fit(plain, loader(60, 20, shuffle=True), **options)
    assert plain.sizes == [20, 20, 20, 20]


class Wide(L.LightningModule):
    """Each sample takes 800 kB, several times."""

    tried = Attempts()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tried.append(len(batch))
        return (self.layer(batch).expand(-1, 200_000) * 1.0).sin().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# In another process, whose memory is limited.
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the memory of a process")
@pytest.mark.world_size(1)
def test_the_memory_of_a_real_process() -> None:
    import resource

    torch.set_num_threads(1)
    model, plain = Wide(), Wide()
    plain.load_state_dict(model.state_dict())
    data = list(torch.randn(3, 64, 4))
    quiet().fit(plain, data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 80_000_000, resource.RLIM_INFINITY))
    quiet(micro_batch="auto").fit(model, data)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.testing.assert_close(model.layer.weight, plain.layer.weight)
    # From the whole batch down by halves, and never up again.
    tried = model.tried
    assert tried[0] == 64
    assert tried[-1] < 64
    assert tried == sorted(tried, reverse=True)
    assert set(tried) == {64 >> step for step in range(7) if 64 >> step >= tried[-1]}


# -- two processes


class Unequal(Limited):
    """Its weights shrink by themselves, but for those nothing was computed with."""

    def forward(self, x: Tensor) -> Tensor:
        return Classifier.forward(self, x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class OnOneRank(Unequal):
    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if self.training and len(x) > self.fits and self.global_rank == 1 and self.global_step >= 1:
            return self.layers[3](Explodes.apply(self.layers[:3](x)))
        return Classifier.forward(self, x)


@pytest.mark.world_size(2)
def test_one_rank_that_runs_out_of_memory_stops_no_other(tmp_path: Any) -> None:
    torch.set_num_threads(1)
    for accumulate, unused in ((1, True), (2, False)):
        models = []
        for micro_batch in (None, 4, "auto"):
            model = fresh(OnOneRank if micro_batch == "auto" else Unequal)
            model.unused = nn.Linear(2, 2) if unused else None
            trainer = trained(
                model,
                loader(60, 11),
                micro_batch=micro_batch,
                devices=2,
                strategy=DDPStrategy(find_unused_parameters=unused),
                max_epochs=2,
                accumulate_grad_batches=accumulate,
            )
            models.append(model)
        for model in models[1:]:
            assert_same(models[0], model)
        # Both went down in the same step, and stayed there.
        too_many, found = {1: (11, 2), 2: (8, 4)}[accumulate]
        assert models[2].sizes[accumulate] == too_many
        assert max(models[2].sizes[-8:]) == found
        everywhere = trainer.strategy.all_gather(model.layers[0].weight.detach())
        assert torch.equal(everywhere[0], everywhere[1])


@pytest.mark.world_size(2)
def test_both_processes_end_where_nothing_is_left_to_try(tmp_path: Any) -> None:
    class Hopeless(OnOneRank):
        def __init__(self) -> None:
            super().__init__(fits=0)

        global_step = 1

    with pytest.raises(RuntimeError) as caught:
        trained(Hopeless(), loader(8, 4), micro_batch="auto", devices=2, strategy="ddp")
    if isinstance(caught.value, torch.OutOfMemoryError):
        assert "(samples at once: 1)" in caught.value.__notes__[-1]
    else:
        assert "Memory ran out on another process (samples at once: 1)" in str(caught.value)
