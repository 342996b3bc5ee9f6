"""matgl: a potential and a property of crystals, learned from graphs, with forces in validation and a reload."""

import lightning.pytorch as pl
import numpy as np
import record
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matgl.ext.pymatgen import Structure2Graph
from matgl.graph.data import MGLDataLoader, MGLDataset, collate_fn_graph, collate_fn_pes
from matgl.models import M3GNet, MEGNet
from matgl.utils.training import ModelLightningModule, PotentialLightningModule
from pymatgen.core import Lattice, Structure

pl.seed_everything(0)
generator = np.random.default_rng(0)
structures = []
for edge in np.linspace(3.8, 4.6, 12):
    crystal = Structure(Lattice.cubic(edge), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    structures.append(crystal.perturb(0.05, seed=int(edge * 100)))
energies = [float((crystal.volume - 70) ** 2 / 200) for crystal in structures]
elements = ("Cl", "Na")
options = {"save_cache": False, "structures": structures, "converter": Structure2Graph(elements, cutoff=4.0)}
quiet = {"accelerator": "cpu", "enable_progress_bar": False}

forces = [generator.normal(size=(2, 3)).tolist() for _ in structures]
labels = {"energies": energies, "forces": forces, "stresses": [np.zeros((3, 3)).tolist()] * 12}
atoms = MGLDataset(include_line_graph=False, labels=labels, root="potential", **options)
train, validation = (torch.utils.data.Subset(atoms, range(*ends)) for ends in ((8,), (8, 12)))
loaders = MGLDataLoader(train, validation, collate_fn=collate_fn_pes, batch_size=2, num_workers=0)
network = M3GNet(
    elements, dim_node_embedding=8, dim_edge_embedding=8, units=8, nblocks=1, cutoff=4.0, is_intensive=False
)
losses, checkpoints = record.KeepLosses(), ModelCheckpoint("checkpoints", monitor="val_Total_Loss")
potential = PotentialLightningModule(network, lr=0.01, stress_weight=0.01, decay_steps=4)
trainer = pl.Trainer(
    max_epochs=3,
    inference_mode=False,
    gradient_clip_val=2.0,
    logger=CSVLogger("logs"),
    callbacks=[losses, checkpoints, LearningRateMonitor()],
    **quiet,
)
trainer.fit(potential, *loaders)
(scores,) = trainer.validate(potential, loaders[1], ckpt_path="best", weights_only=False, verbose=False)

property_losses = record.KeepLosses()
formation = MGLDataset(labels={"formation": energies}, root="property", **options)
train, validation = (torch.utils.data.Subset(formation, range(*ends)) for ends in ((8,), (8, 12)))
loaders = MGLDataLoader(train, validation, collate_fn=collate_fn_graph, batch_size=2, num_workers=0)
network = MEGNet(dim_node_embedding=8, dim_edge_embedding=8, nblocks=1, element_types=elements, niters_set2set=1)
model = ModelLightningModule(network, loss="l1_loss", lr=0.01)
trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, callbacks=[property_losses], **quiet)
trainer.fit(model, *loaders)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    property_losses=property_losses.losses,
    property_epochs=property_losses.epochs,
    forecast=[float(batch[0]["Total_Loss"]) for batch in trainer.predict(model, loaders[1])],
)
