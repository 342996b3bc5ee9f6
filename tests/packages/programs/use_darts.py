"""darts: forecast a series with NBEATS and a recurrent network."""

import numpy as np
import record
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel

series = TimeSeries.from_values(np.sin(np.arange(120, dtype=np.float32) / 5)[:, None])
train, validation = series[:90], series[70:]
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}

seen = {}
for kind, options in ((NBEATSModel, {"num_stacks": 2, "layer_widths": 16}), (BlockRNNModel, {"hidden_dim": 8})):
    losses = record.KeepLosses()
    model = kind(
        input_chunk_length=12,
        output_chunk_length=4,
        n_epochs=2,
        batch_size=16,
        random_state=0,
        pl_trainer_kwargs={**quiet, "callbacks": [losses]},
        **options,
    )
    model.fit(train, val_series=validation)
    forecast = model.predict(n=4, series=train)
    seen[kind.__name__] = [losses.losses, losses.epochs, forecast.values().ravel().tolist()]
record.write(**seen)
