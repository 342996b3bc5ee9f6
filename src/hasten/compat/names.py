"""The names of Lightning, by module, where they live in hasten, and what to use for those it does not have."""

from __future__ import annotations

from pathlib import Path

# What packages compare with: `lightning.__version__` and `importlib.metadata.version("lightning")`.
VERSION = "2.6.6"

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
    "fabric.cli": "Start programs with hasten launch or torchrun, or let strategy='ddp' start the processes.",
    "fabric.plugins.collectives": _COLLECTIVE,
    "fabric.strategies.launchers": _LAUNCHER,
    "fabric.utilities.consolidate_checkpoint": "Write hasten consolidate FOLDER.",
    "fabric.utilities.init": "Use fabric.init_module() or trainer.init_module().",
    "fabric.utilities.load": "Use hasten.checkpoint.files.load, or fabric.load_raw.",
    "fabric.utilities.registry": "Pass objects instead of registered names.",
    "fabric.utilities.testing": "It is a helper of Lightning's own tests.",
    "pytorch.accelerators.TPUAccelerator": "Its name is XLAAccelerator now.",
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
    "pytorch.utilities.deepspeed": "A checkpoint folder becomes one file with: hasten consolidate FOLDER.",
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


def _lines(name: str) -> list[str]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line for line in text.strip().replace("\n    ", " ").split("\n") if not line.startswith("#")]


def _read_homes() -> dict[str, dict[str, tuple[str, str]]]:
    """Return section -> name of Lightning -> (module of hasten, name there)."""
    homes: dict[str, dict[str, tuple[str, str]]] = {"": {}}
    names = homes[""]
    for line in _lines("homes.txt"):
        if line.startswith("["):
            names = homes.setdefault(line.strip("[]"), {})
            continue
        home, _, words = line.partition(": ")
        for name, _, there in (word.partition("=") for word in words.split()):
            names[name] = (home, there or name)
    return homes


def read_table() -> dict[str, dict[str, tuple[str, str]]]:
    """Return module of Lightning, without its root -> its names -> (module of hasten, name there)."""
    homes = _read_homes()
    rows: dict[str, str] = {}
    for line in _lines("modules.txt"):
        if line.startswith("["):
            package, _, rows[package] = line[1:].partition("]")
            continue
        for entry in line.split(";"):
            module, _, names = entry.strip().partition(":")
            rows[".".join(filter(None, (package, module)))] = names
    table: dict[str, dict[str, tuple[str, str]]] = {}
    for module, names in rows.items():
        # The innermost section that has a name counts.
        sections = [homes[section] for section in reversed(homes) if f"{module}.".startswith(section)]
        table[module] = {name: next(s[name] for s in sections if name in s) for name in names.split()}
    return table
