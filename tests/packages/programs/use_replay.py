"""replay: a recommender of the next item, with its own loaders of parquet files, metrics and predictions."""

import lightning
import numpy as np
import pandas as pd
import record
from lightning.pytorch.callbacks import ModelCheckpoint
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import ParquetModule, TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.lightning.callback import ComputeMetricsCallback, TorchTopItemsCallback
from replay.nn.lightning.optimizer import OptimizerFactory
from replay.nn.lightning.scheduler import LRSchedulerFactory
from replay.nn.sequential import SasRec
from replay.nn.transform.template import make_default_sasrec_transforms

ITEMS, LENGTH = 12, 8
lightning.seed_everything(0)
schema = TensorSchema(
    TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=FeatureType.CATEGORICAL,
        embedding_dim=8,
        padding_value=ITEMS,
        cardinality=ITEMS,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )
)
generator = np.random.default_rng(0)
starts = generator.integers(0, ITEMS, 48)
histories = [[int(start + step) % ITEMS for step in range(int(generator.integers(4, 14)))] for start in starts]
rows = {"query_id": range(48), "item_id": histories, "train": histories}
frame = pd.DataFrame({**rows, "ground_truth": [[(history[-1] + 1) % ITEMS] for history in histories]})
frame[["item_id"]][:32].to_parquet("train.parquet")
frame[32:40].to_parquet("first.parquet")
frame[40:].to_parquet("second.parquet")
items = {"shape": LENGTH, "padding": ITEMS}
held_out = {
    "query_id": {},
    "item_id": items,
    "train": {"shape": 16, "padding": -2},
    "ground_truth": {"shape": 1, "padding": -1},
}
data = ParquetModule(
    batch_size=4,
    metadata={
        "train": {"item_id": {"shape": LENGTH + 1, "padding": ITEMS}},
        **dict.fromkeys(("validate", "test", "predict"), held_out),
    },
    transforms=make_default_sasrec_transforms(schema),
    train_path="train.parquet",
    validate_path=["first.parquet", "second.parquet"],
    test_path="second.parquet",
    predict_path="second.parquet",
)
model = LightningModule(
    SasRec.from_params(schema, embedding_dim=8, num_heads=2, num_blocks=1, max_sequence_length=LENGTH),
    OptimizerFactory(learning_rate=0.01),
    LRSchedulerFactory(decay_step=1, gamma=0.5),
)
losses = record.KeepLosses()
checkpoints = ModelCheckpoint("checkpoints", monitor="ndcg@5/dataloader_idx_0", mode="max", save_top_k=1)
metrics = ComputeMetricsCallback(["ndcg", "recall", "coverage"], ks=[1, 5], item_count=ITEMS)
top = TorchTopItemsCallback(top_k=3, query_column="query_id")
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[losses, checkpoints, metrics, top],
)
trainer.fit(model, datamodule=data)
(scores,) = trainer.test(model, datamodule=data, ckpt_path="best", weights_only=False, verbose=False)
trainer.predict(model, datamodule=data, return_predictions=False)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    metrics=[metrics.get_metrics(stage) for stage in ("validate", "test")],
    forecast=[tensor.flatten().tolist() for tensor in top.get_result()],
)
