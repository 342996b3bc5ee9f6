"""gluonts: a feed-forward and a recurrent estimator, whose training builds its own Trainer and checkpoints."""

import numpy as np
import pandas as pd
import record
import torch
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator
from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator

series = [np.sin(np.arange(100) / step).astype("float32") + 2 for step in (3, 7)]
data = ListDataset([{"start": pd.Period("2024-01-01", "D"), "target": one} for one in series], freq="D")
quiet = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "logger": False}
quiet["enable_model_summary"] = False  # Lightning's draws random numbers when it runs the example input.

seen = {}
for kind, options in ((SimpleFeedForwardEstimator, {"hidden_dimensions": [8]}), (DeepAREstimator, {"freq": "D"})):
    torch.manual_seed(0)
    np.random.seed(0)
    losses = record.KeepLosses()
    estimator = kind(
        prediction_length=4,
        context_length=8,
        batch_size=8,
        num_batches_per_epoch=4,
        trainer_kwargs={**quiet, "callbacks": [losses]},
        **options,
    )
    predictor = estimator.train(data)
    torch.manual_seed(0)
    forecast = next(iter(predictor.predict(data)))
    seen[kind.__name__] = [losses.losses, losses.epochs, forecast.mean.tolist()]
record.write(**seen)
