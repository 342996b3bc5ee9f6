"""pytorch-tabular: a classifier of a small table, with its own Trainer, early stopping and checkpoints."""

import numpy as np
import pandas as pd
import record
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

generator = np.random.default_rng(0)
frame = pd.DataFrame({"x": generator.normal(size=96), "y": generator.normal(size=96), "kind": np.arange(96) % 3})
frame["target"] = (frame.x + frame.y > 0).astype(int)
frame["kind"] = frame["kind"].astype(str)
losses = record.KeepLosses()
model = TabularModel(
    data_config=DataConfig(target=["target"], continuous_cols=["x", "y"], categorical_cols=["kind"]),
    model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", seed=0),
    optimizer_config=OptimizerConfig(),
    trainer_config=TrainerConfig(
        batch_size=16,
        max_epochs=2,
        accelerator="cpu",
        progress_bar="none",
        trainer_kwargs={"enable_model_summary": False},
        seed=0,
        load_best=False,
    ),
    verbose=False,
)
model.fit(train=frame[:64], validation=frame[64:], callbacks=[losses])
forecast = model.predict(frame[64:])
record.write(
    losses=losses.losses, epochs=losses.epochs, forecast=forecast.filter(like="probability").to_numpy().ravel().tolist()
)
