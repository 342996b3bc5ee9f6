"""chemprop: a message-passing network over molecules, trained, tested and used to predict."""

import lightning.pytorch as pl
import numpy as np
import record
from chemprop import data, models, nn

pl.seed_everything(0)
molecules = ["C" * length + end for length in range(1, 9) for end in ("O", "N", "Cl", "C=O")]
targets = np.arange(len(molecules), dtype=float)[:, None] / 10
points = [data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(molecules, targets, strict=True)]
train, validation = data.MoleculeDataset(points[::2]), data.MoleculeDataset(points[1::2])
scaler = train.normalize_targets()
validation.normalize_targets(scaler)
model = models.MPNN(
    nn.BondMessagePassing(d_h=16),
    nn.MeanAggregation(),
    nn.RegressionFFN(input_dim=16, hidden_dim=16, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
    batch_norm=True,
)
losses = record.KeepLosses()
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[losses],
)
trainer.fit(
    model,
    data.build_dataloader(train, batch_size=4, num_workers=0, seed=0),
    data.build_dataloader(validation, batch_size=4, num_workers=0, shuffle=False),
)
loader = data.build_dataloader(validation, batch_size=4, num_workers=0, shuffle=False)
(scores,) = trainer.test(model, loader, weights_only=False)
forecast = trainer.predict(model, loader)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    forecast=[value for batch in forecast for value in batch.flatten().tolist()],
)
