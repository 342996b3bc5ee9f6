"""neuralforecast: two series, an MLP and NHITS, with validation and early stopping."""

import numpy as np
import pandas as pd
import record
from neuralforecast import NeuralForecast
from neuralforecast.models import MLP, NHITS

days = pd.date_range("2024-01-01", periods=80)
frame = pd.concat(
    [
        pd.DataFrame({"unique_id": name, "ds": days, "y": np.sin(np.arange(80) / step)})
        for name, step in (("slow", 9), ("fast", 3))
    ]
)
losses = [record.KeepLosses(), record.KeepLosses()]
common = {
    "h": 4,
    "input_size": 12,
    "max_steps": 6,
    "val_check_steps": 3,
    "early_stop_patience_steps": 2,
    "random_seed": 1,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "logger": False,
}
models = [
    MLP(hidden_size=16, num_layers=2, callbacks=[losses[0]], **common),
    NHITS(mlp_units=[[16, 16]] * 3, callbacks=[losses[1]], **common),
]
forecaster = NeuralForecast(models=models, freq="D")
forecaster.fit(frame, val_size=8)
forecast = forecaster.predict()
record.write(
    losses=[one.losses for one in losses],
    epochs=[one.epochs for one in losses],
    forecast={name: forecast[name].tolist() for name in ("MLP", "NHITS")},
)
