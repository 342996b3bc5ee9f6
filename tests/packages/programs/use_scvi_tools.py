"""scvi-tools: variational models of single cells, with early stopping, checkpoints of whole models and a reload."""

import anndata
import numpy as np
import pandas as pd
import record
import scvi

scvi.settings.seed = 0
generator = np.random.default_rng(0)
counts = generator.poisson(generator.gamma(2.0, 1.0, size=(96, 24))).astype(np.float32)
cells = anndata.AnnData(
    counts, obs=pd.DataFrame({"batch": [f"b{i % 2}" for i in range(96)]}, index=map(str, range(96)))
)
cells.obs["label"] = pd.Categorical(np.where(counts[:, 0] > 2, "high", "low"))
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "batch_size": 32, "train_size": 0.75}

scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
losses = record.KeepLosses()
model = scvi.model.SCVI(cells, n_hidden=16, n_latent=3)
model.train(
    max_epochs=4,
    early_stopping=True,
    early_stopping_patience=2,
    enable_checkpointing=True,
    checkpointing_monitor="elbo_validation",
    callbacks=[losses],
    **quiet,
)
model.save("model", overwrite=True)
again = scvi.model.SCVI.load("model", cells, accelerator="cpu")

scvi.model.SCANVI.setup_anndata(cells, labels_key="label", unlabeled_category="unknown", batch_key="batch")
label_losses = record.KeepLosses()
labeled = scvi.model.SCANVI(cells, n_hidden=16, n_latent=3)
labeled.train(max_epochs=2, check_val_every_n_epoch=1, callbacks=[label_losses], **quiet)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    history={key: np.asarray(value).ravel().tolist() for key, value in sorted(model.history.items())},
    latent=again.get_latent_representation(cells).ravel().tolist(),
    elbo=float(again.get_elbo(cells)),
    label_losses=label_losses.losses,
    label_epochs=label_losses.epochs,
    labels=labeled.predict(cells, soft=True).to_numpy().ravel().tolist(),
)
