"""pina: a physics-informed network for Poisson's equation, with refinement, metrics, checkpoints and a test."""

import lightning.pytorch as pl
import record
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pina import Trainer
from pina.callback import MetricTracker, SwitchOptimizer
from pina.model import FeedForward
from pina.optim import TorchOptimizer
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import PINN

pl.seed_everything(0)
problem = Poisson2DSquareProblem()
problem.discretise_domain(40, "random")
network = FeedForward(len(problem.input_variables), len(problem.output_variables), inner_size=8, n_layers=2)
solver = PINN(problem, network, optimizer=TorchOptimizer(torch.optim.Adam, lr=0.01))
losses, tracker = record.KeepLosses(), MetricTracker()
switch = SwitchOptimizer(TorchOptimizer(torch.optim.LBFGS, max_iter=3), epoch_switch=4)
trainer = Trainer(
    solver,
    max_epochs=6,
    batch_size=10,
    train_size=0.7,
    val_size=0.2,
    test_size=0.1,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[losses, tracker, switch, ModelCheckpoint("checkpoints", save_last=True)],
)
trainer.train()
(scores,) = trainer.test()
points = problem.spatial_domain.sample(8, "grid")
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    metrics={key: value.tolist() for key, value in tracker.metrics.items()},
    scores=scores,
    forecast=solver(points).flatten().tolist(),
)
