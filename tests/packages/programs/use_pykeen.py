"""pykeen: embeddings of a knowledge graph, trained on its own data set in both of the package's ways."""

import pytorch_lightning as pl
import record
import torch
from pykeen.contrib.lightning import LCWALitModule, SLCWALitModule

results = {}
for kind, options in ((LCWALitModule, {"model": "mure"}), (SLCWALitModule, {"model": "transe"})):
    pl.seed_everything(0)
    module = kind(
        dataset="nations",
        dataset_kwargs={"create_inverse_triples": kind is LCWALitModule},
        model_kwargs={"embedding_dim": 8},
        batch_size=64,
        optimizer="adam",
        **options,
    )
    losses, checkpoints = record.KeepLosses(), pl.callbacks.ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(f"logs-{kind.__name__}"),
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=[losses, checkpoints, pl.callbacks.EarlyStopping("val_loss")],
    )
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, ckpt_path=checkpoints.last_model_path)
    with torch.no_grad():
        forecast = module(torch.tensor([[0, 1], [2, 3]]))
    results[kind.__name__] = [
        losses.losses,
        losses.epochs,
        float(checkpoints.best_model_score),
        forecast.flatten().tolist(),
    ]
record.write(**results)
