"""pytorch-forecasting: a temporal fusion transformer with early stopping, checkpoints, prediction and a reload."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import record
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

pl.seed_everything(0)
frame = pd.DataFrame(
    {
        "time": np.tile(np.arange(40), 3),
        "series": np.repeat(["a", "b", "c"], 40),
        "value": np.concatenate([np.sin(np.arange(40) / step) + 2 for step in (3, 5, 7)]).astype("float32"),
    }
)
data = TimeSeriesDataSet(
    frame[frame.time < 32],
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=8,
    max_prediction_length=4,
    time_varying_unknown_reals=["value"],
    time_varying_known_reals=["time"],
)
validation = TimeSeriesDataSet.from_dataset(data, frame, predict=True, stop_randomization=True)
train_loader = data.to_dataloader(train=True, batch_size=16, num_workers=0)
validation_loader = validation.to_dataloader(train=False, batch_size=16, num_workers=0)
model = TemporalFusionTransformer.from_dataset(
    data,
    learning_rate=0.03,
    hidden_size=8,
    attention_head_size=1,
    dropout=0.1,
    loss=QuantileLoss(),
    log_interval=-1,
    reduce_on_plateau_patience=2,
)
losses, checkpoints = record.KeepLosses(), ModelCheckpoint(monitor="val_loss")
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=4,
    enable_progress_bar=False,
    callbacks=[losses, EarlyStopping("val_loss"), LearningRateMonitor(), checkpoints],
    logger=CSVLogger("logs"),
)
trainer.fit(model, train_loader, validation_loader)
best = TemporalFusionTransformer.load_from_checkpoint(checkpoints.best_model_path, weights_only=False)
forecast = best.predict(
    validation_loader, trainer_kwargs={"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
)
record.write(losses=losses.losses, epochs=losses.epochs, forecast=torch.as_tensor(forecast).flatten().tolist())
