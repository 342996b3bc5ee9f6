"""A package built on Lightning, unchanged: pytorch-forecasting's temporal fusion transformer on seasonal series.

It knows nothing of hasten: ``hasten run`` leads the names of Lightning there, and takes the arguments of the Trainer.
"""

from __future__ import annotations

import sys
from typing import IO, Any

import torch
from benchmarks.workloads.clock import Clock

# For ``hasten run``, by column; None is Lightning itself.
OPTIONS: dict[str, list[str] | None] = {
    "lightning": None,
    "defaults": [],
    "auto": ["--speed", "auto"],
    "best": ["--fused-optimizer", "--allocator", "keep"],
}
TITLE = "temporal fusion transformer of pytorch-forecasting on 60 series, batches of 64"
MAX_STEPS, TURN_STEPS, QUICK_STEPS = 200, 20, 4
GOAL, GOAL_TEXT = 0.12, "a mean quantile loss of 0.12 over 20 steps"


def main(reports: IO[str]) -> None:
    """Train with the names of Lightning."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    clock = Clock(sys.stdin, reports, torch.device("cpu"), lambda model: float("nan"))

    class Turns(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.step(pl_module, outputs["loss"] if isinstance(outputs, dict) else outputs)

    pl.seed_everything(0)
    days, series = np.arange(400), 60
    noise = np.random.default_rng(0).normal(0, 0.1, (series, len(days)))
    values = np.sin(days / (3 + np.arange(series)[:, None] % 7)) + 2 + noise
    frame = pd.DataFrame(
        {
            "time": np.tile(days, series),
            "series": np.repeat([f"series {i}" for i in range(series)], len(days)),
            "value": values.ravel().astype("float32"),
        }
    )
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=32,
        max_prediction_length=8,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.01,
        hidden_size=32,
        attention_head_size=2,
        dropout=0.0,
        loss=QuantileLoss(),
        log_interval=-1,
        optimizer="adam",
    )
    trainer = pl.Trainer(
        max_epochs=1 + MAX_STEPS // 100,
        accelerator="cpu",
        gradient_clip_val=0.1,
        limit_train_batches=200,
        callbacks=[Turns()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data.to_dataloader(train=True, batch_size=64, num_workers=0))
