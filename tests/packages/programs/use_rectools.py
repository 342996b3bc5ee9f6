"""rectools: recommendations by SASRec and BERT4Rec, whose trainer is copied and whose checkpoints are loaded."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import record
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel, SASRecModel

generator = np.random.default_rng(0)
rows = [
    (user, (start + step * (1 + user % 2)) % 12, 1.0, f"2024-01-{step + 1:02}")
    for user, start in enumerate(generator.integers(0, 12, 24))
    for step in range(int(generator.integers(4, 10)))
]
data = Dataset.construct(pd.DataFrame(rows, columns=Columns.Interactions))
seen = record.KeepLosses()


class Keep(record.KeepLosses):
    """Keeps values outside of itself: the trainer and its callbacks are copied."""

    def on_train_batch_end(self, *arguments: object) -> None:
        """Keep the loss of a step."""
        super().on_train_batch_end(*arguments)
        kept[self.name] = self.losses

    def on_train_end(self, *arguments: object) -> None:
        """Keep what was logged."""
        super().on_train_end(*arguments)
        kept[f"{self.name} epochs"] = self.epochs


kept: dict[str, object] = {}


def trainer() -> pl.Trainer:
    """Return the trainer that the package copies."""
    losses = Keep()
    losses.name = name
    return pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        deterministic=True,
        logger=pl.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, pl.callbacks.ModelCheckpoint(f"checkpoints-{name}", save_last=True)],
    )


def held_out(interactions: pd.DataFrame) -> np.ndarray:
    """Return which interactions are for validation."""
    return interactions.groupby(Columns.User).cumcount(ascending=False).to_numpy() == 0


results = {}
for kind in (SASRecModel, BERT4RecModel):
    name = kind.__name__
    pl.seed_everything(0)
    model = kind(
        n_blocks=1,
        n_heads=2,
        n_factors=8,
        session_max_len=6,
        batch_size=8,
        lr=0.01,
        verbose=0,
        get_val_mask_func=held_out,
        get_trainer_func=trainer,
        recommend_torch_device="cpu",
    )
    model.fit(data)
    users = data.user_id_map.external_ids
    first = model.recommend(users, data, k=3, filter_viewed=True)
    again = kind.load_from_checkpoint(f"checkpoints-{name}/last.ckpt")
    second = again.recommend(users, data, k=3, filter_viewed=False)
    results[f"{name} forecasts"] = [
        first[Columns.Score].tolist(),
        second[Columns.Score].tolist(),
        second[Columns.Item].tolist(),
    ]
record.write(**results, **kept)
