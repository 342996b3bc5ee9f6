"""Callbacks and levers under FSDP: averages of the weights, and whatever else reads parameters, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.test_fsdp import Net, fit, loader, whole

import hasten as L
from hasten.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from hasten.strategies import FSDPStrategy

AVERAGES: dict[str, Callable[[], Any]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "mean": lambda: WeightAveraging(),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1),
}


def close(ours: Any, expected: Any, tolerance: float) -> None:
    for name, value in whole(expected).items():
        torch.testing.assert_close(whole(ours)[name], value, atol=tolerance, rtol=tolerance)


@pytest.mark.world_size(2)
def test_averages_are_those_of_one_process_and_each_process_holds_its_part() -> None:
    for make in AVERAGES.values():
        (one, expected), (many, ours) = fit(1, "auto", callbacks=make()), fit(2, "fsdp", callbacks=make())
        # The module holds the average; what was validated and logged is that of the average, too.
        close(ours, expected, 1e-6)
        for name, value in one.callback_metrics.items():
            torch.testing.assert_close(many.callback_metrics[name], value, atol=1e-6, rtol=1e-6)
        average = many.callbacks[0]._average_model  # type: ignore[attr-defined]
        tensors = list(average.parameters() if isinstance(average, torch.nn.Module) else average._averages.values())
        assert sum(t.numel() for t in tensors) <= 0.55 * sum(p.numel() for p in ours.parameters())


@pytest.mark.world_size(2)
def test_averages_are_saved_whole_or_in_shards_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    for name, make in AVERAGES.items():
        _, expected = fit(2, "fsdp", callbacks=make(), max_epochs=3)
        for kind in ("full", "sharded"):
            path = str(tmp_path / f"{name}-{kind}.ckpt")
            first, averaged = fit(2, FSDPStrategy(state_dict_type=kind), callbacks=make(), max_epochs=2)
            first.save_checkpoint(path)
            if name != "swa":
                # Whoever loads the file gets the average, and the training weights are beside it.
                loaded = Net.load_from_checkpoint(path)
                close(loaded, averaged, 1e-7)
            close(resumed(2, "fsdp", path, make()), expected, 1e-7)
            # One process reads what two have written.
            close(resumed(1, "auto", path, make()), expected, 1e-5)
            first.strategy.barrier()


def resumed(devices: int, strategy: str, path: str, callback: Any) -> Net:
    net = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3, accumulate_grad_batches=2,
        gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callback,
    )  # fmt: skip
    trainer.fit(net, loader(8 // devices, 48), loader(8 // devices, 16), ckpt_path=path)
    return net
