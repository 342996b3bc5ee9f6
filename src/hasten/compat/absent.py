"""What to use in place of names of Lightning that hasten does not have."""

from __future__ import annotations

_LOOP = (
    "hasten has no loop objects to subclass: override the hooks of LightningModule, read trainer.fit_loop, or write "
    "the loop yourself with hasten.Fabric."
)
_CONNECTOR = "It is an internal of Lightning's Trainer: read the properties of trainer instead."
_LAUNCHER = "Processes are started by the strategy: use strategy='ddp', 'ddp_spawn' or 'ddp_notebook'."
_COLLECTIVE = "Use fabric.all_reduce, fabric.broadcast and fabric.barrier, or torch.distributed."
_PRODUCT = "It belongs to a hosted product."

# Beginning of a module or name -> what to do. The longest match counts.
ALTERNATIVES = {
    "app": _PRODUCT,
    "data": "Use the package litdata, or a torch DataLoader.",
    "fabric.cli": "Start programs with torchrun, or let strategy='ddp' start the processes.",
    "fabric.plugins.collectives": _COLLECTIVE,
    "fabric.strategies.launchers": _LAUNCHER,
    "fabric.utilities.consolidate_checkpoint": "Checkpoints of hasten are whole files: load them as they are.",
    "fabric.utilities.init": "Use fabric.init_module() or trainer.init_module().",
    "fabric.utilities.load": "Use hasten.checkpoint.files.load, or fabric.load_raw.",
    "fabric.utilities.registry": "Pass objects instead of registered names.",
    "fabric.utilities.testing": "It is a helper of Lightning's own tests.",
    "pytorch.accelerators.TPUAccelerator": "hasten does not train on TPUs: write Trainer(accelerator='auto').",
    "pytorch.demos.mnist_datamodule": "Use hasten.demos.BoringDataModule, or torchvision.datasets.MNIST.",
    "pytorch.lite": "Use hasten.Fabric.",
    "pytorch.loggers.LightningLoggerBase": "It was removed in Lightning 2.0: subclass Logger.",
    "pytorch.loops": _LOOP,
    "pytorch.metrics": "Use the package torchmetrics.",
    "pytorch.overrides": "Use torch.nn.parallel.DistributedDataParallel; strategy='ddp' wraps the module by itself.",
    "pytorch.serve": "Export the module with to_torchscript() or to_onnx() and serve that.",
    "pytorch.strategies.launchers": _LAUNCHER,
    "pytorch.trainer.call": _CONNECTOR,
    "pytorch.trainer.configuration_validator": _CONNECTOR,
    "pytorch.trainer.connectors": _CONNECTOR,
    "pytorch.trainer.setup": _CONNECTOR,
    "pytorch.trainer.supporters": "CombinedLoader is in lightning.pytorch.utilities.combined_loader.",
    "pytorch.utilities.argparse": "Use LightningCLI, or build the Trainer yourself: Trainer(**vars(args)).",
    "pytorch.utilities.compile": "Use torch.compile(module), and module._orig_mod for the module inside.",
    "pytorch.utilities.consolidate_checkpoint": "Checkpoints of hasten are whole files: load them as they are.",
    "pytorch.utilities.deepspeed": "DeepSpeed is not in this version of hasten.",
    "pytorch.utilities.migration": "Checkpoints of Lightning 2.x are read as they are: pass ckpt_path.",
    "pytorch.utilities.model_registry": _PRODUCT,
    "pytorch.utilities.testing": "It is a helper of Lightning's own tests.",
    "pytorch.utilities.upgrade_checkpoint": "Checkpoints of Lightning 2.x are read as they are: pass ckpt_path.",
    "store": _PRODUCT,
}


def alternative_to(place: str) -> str | None:
    """Return what to use in place of a name or module, for instance ``"pytorch.serve"``; None if nothing is known."""
    while place:
        if place in ALTERNATIVES:
            return ALTERNATIVES[place]
        place = place.rpartition(".")[0]
    return None
