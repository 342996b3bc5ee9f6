"""swyft: simulation-based inference with early stopping and a test of the best checkpoint."""

import numpy as np
import pytorch_lightning as pl
import record
import scipy.integrate
import torch

scipy.integrate.simps = scipy.integrate.simpson  # Renamed in scipy since the last release of swyft.
import swyft  # noqa: E402


class Line(swyft.Simulator):
    """A line with noise, whose slope and offset are to be inferred."""

    def __init__(self) -> None:
        super().__init__()
        self.transform_samples = swyft.to_numpy32
        self.generator = np.random.default_rng(0)

    def build(self, graph: swyft.Graph) -> None:
        """Draw the parameters, then the data."""
        z = graph.node("z", lambda: self.generator.uniform(-1, 1, 2))
        graph.node("x", lambda z: z[0] * np.linspace(-1, 1, 8) + z[1] + self.generator.normal(size=8) * 0.1, z)


class Ratios(swyft.SwyftModule):
    """Ratios for one parameter at a time, and for both."""

    def __init__(self) -> None:
        super().__init__()
        self.single = swyft.LogRatioEstimator_1dim(num_features=8, num_params=2, hidden_features=16, varnames="z")
        self.pair = swyft.LogRatioEstimator_Ndim(num_features=8, marginals=((0, 1),), hidden_features=16, varnames="z")

    def forward(self, data: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> tuple[object, object]:
        """Return the ratios of the parameters given the data."""
        return self.single(data["x"], parameters["z"]), self.pair(data["x"], parameters["z"])


pl.seed_everything(0)
simulator = Line()
samples = simulator.sample(96)
losses = record.KeepLosses()
checkpoints = pl.callbacks.ModelCheckpoint("checkpoints", monitor="val_loss")
trainer = swyft.SwyftTrainer(
    accelerator="cpu",
    max_epochs=3,
    logger=False,
    enable_progress_bar=False,
    callbacks=[losses, checkpoints, pl.callbacks.EarlyStopping("val_loss", patience=2)],
)
network = Ratios()
data = swyft.SwyftDataModule(samples, fractions=[0.6, 0.2, 0.2], batch_size=16, shuffle=True)
trainer.fit(network, data)
(scores,) = trainer.test(network, data, ckpt_path=checkpoints.best_model_path, weights_only=False)
with torch.no_grad():
    single, pair = network({"x": torch.tensor(samples["x"])}, {"z": torch.tensor(samples["z"])})
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    best=float(checkpoints.best_model_score),
    single=single.logratios.flatten().tolist(),
    pair=pair.logratios.flatten().tolist(),
)
