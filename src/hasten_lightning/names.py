"""The names of Lightning by module, their places in hasten, and replacements for names that hasten does not have."""

from __future__ import annotations

from pathlib import Path

# What packages compare with: `lightning.__version__` and `importlib.metadata.version("lightning")`.
VERSION = "2.6.6"

_OWN_VERSION = "hasten.__version__ counts from another beginning: leave the comparison out."
_LOOP = (
    "hasten has no loop objects to subclass: override the hooks of LightningModule, read trainer.fit_loop, or write "
    "the loop yourself with hasten.Fabric."
)
_CONNECTOR = "It is an internal of Lightning's Trainer: read the properties of trainer instead."
_LAUNCHER = "Processes are started by the strategy: use strategy='ddp', 'ddp_spawn' or 'ddp_notebook'."
_PRODUCT = "It belongs to a hosted product."
_LOGGERS = "Use CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger or CometLogger."
_JOBS = "Start programs with hasten run or hasten launch on machines of your own, or write a job of your cluster."
_FILES = "Write weights with trainer.save_checkpoint, and store or share the file as your organization does."
_TESTS = "It is a helper of Lightning's own tests."
_SHARDED = "Use strategy='ddp_sharded'."
_FSDP = "Use FSDPStrategy."
_NO_PLUGIN = "Its place is the argument strategy=... now, and its class is in lightning.pytorch.strategies."
_MIXED = "Its name is MixedPrecision now; precision='16-mixed' or 'bf16-mixed' makes one."
_NO_TPU = "Its name is XLAStrategy now."
_GONE = "It is no longer developed, and Lightning 2 does not have it either."
_FABRIC_LOGGER = "It is in lightning.fabric.utilities.logger."

# Beginning of a module or name -> what to do. The longest match counts. Names that only Lightning 1 has are among them.
ALTERNATIVES = {
    "__version__": _OWN_VERSION,
    "app": f"{_PRODUCT} {_JOBS}",
    "data": "Use the package litdata, or a torch DataLoader.",
    "fabric.__version__": _OWN_VERSION,
    "fabric.cli": "Start programs with hasten launch or torchrun, or let strategy='ddp' start the processes.",
    "fabric.strategies.fsdp": "Pass activation_checkpointing_policy=... and state_dict_type=... to FSDPStrategy.",
    "fabric.strategies.launchers": _LAUNCHER,
    "fabric.utilities.consolidate_checkpoint": "Write hasten consolidate FOLDER.",
    "fabric.utilities.init": "Use fabric.init_module() or trainer.init_module().",
    "fabric.utilities.load": "Use hasten.checkpoint.files.load, or fabric.load_raw.",
    "fabric.utilities.spike.SpikeDetection": "Start the program with hasten run, or compare the losses in its loop.",
    "fabric.utilities.testing": _TESTS,
    "metrics": "Use the package torchmetrics.",
    "profilers": "It is lightning.pytorch.profilers.",
    "pytorch.__version__": _OWN_VERSION,
    "pytorch.callbacks.GPUStatsMonitor": "Use DeviceStatsMonitor.",
    "pytorch.callbacks.ProgressBarBase": "Its name is ProgressBar now.",
    "pytorch.callbacks.QuantizationAwareTraining": "Use torch.ao.quantization.",
    "pytorch.callbacks.XLAStatsMonitor": "Use DeviceStatsMonitor.",
    "pytorch.core.decorators": "Modules of torch move their inputs no longer: write batch.to(module.device).",
    "pytorch.core.grads": "grad_norm is in lightning.pytorch.utilities.",
    "pytorch.core.memory": "ModelSummary is in lightning.pytorch.utilities.model_summary.",
    "pytorch.core.step_result": "Return the loss or a dict, and log with self.log.",
    "pytorch.lite": "Use hasten.Fabric.",
    "pytorch.loggers.LightningLoggerBase": "It was removed in Lightning 2.0: subclass Logger.",
    "pytorch.loggers.LoggerCollection": "Several loggers are a list: Trainer(logger=[...]), trainer.loggers.",
    "pytorch.loggers.TestTubeLogger": f"{_GONE} {_LOGGERS}",
    "pytorch.loggers.base.LightningLoggerBase": "It was removed in Lightning 2.0: subclass Logger.",
    "pytorch.loggers.base.LoggerCollection": "Several loggers are a list: Trainer(logger=[...]), trainer.loggers.",
    "pytorch.loggers.test_tube": f"{_GONE} {_LOGGERS}",
    "pytorch.loops": _LOOP,
    "pytorch.metrics": "Use the package torchmetrics.",
    "pytorch.overrides": "Use torch.nn.parallel.DistributedDataParallel; strategy='ddp' wraps the module by itself.",
    "pytorch.plugins.ApexMixedPrecisionPlugin": _MIXED,
    "pytorch.plugins.DDP2Plugin": _NO_PLUGIN,
    "pytorch.plugins.DDPFullyShardedPlugin": _NO_PLUGIN,
    "pytorch.plugins.DDPPlugin": _NO_PLUGIN,
    "pytorch.plugins.DDPShardedPlugin": _NO_PLUGIN,
    "pytorch.plugins.DDPSpawnPlugin": _NO_PLUGIN,
    "pytorch.plugins.DataParallelPlugin": _NO_PLUGIN,
    "pytorch.plugins.DeepSpeedPlugin": _NO_PLUGIN,
    "pytorch.plugins.HorovodPlugin": _GONE,
    "pytorch.plugins.NativeMixedPrecisionPlugin": _MIXED,
    "pytorch.plugins.ParallelPlugin": _NO_PLUGIN,
    "pytorch.plugins.SingleDevicePlugin": _NO_PLUGIN,
    "pytorch.plugins.TPUSpawnPlugin": _NO_PLUGIN,
    "pytorch.plugins.TrainingTypePlugin": _NO_PLUGIN,
    "pytorch.plugins.environments.cluster_environment": "It is in lightning.pytorch.plugins.environments.",
    "pytorch.plugins.precision.ApexMixedPrecisionPlugin": _MIXED,
    "pytorch.plugins.precision.NativeMixedPrecisionPlugin": _MIXED,
    "pytorch.plugins.training_type": "Strategies are in lightning.pytorch.strategies.",
    "pytorch.profiler": "It is lightning.pytorch.profilers now.",
    "pytorch.strategies.BaguaStrategy": _GONE,
    "pytorch.strategies.ColossalAIStrategy": f"{_GONE} {_FSDP}",
    "pytorch.strategies.DDP2Strategy": f"{_GONE} Use strategy='ddp'.",
    "pytorch.strategies.DDPFullyShardedNativeStrategy": _FSDP,
    "pytorch.strategies.DDPFullyShardedStrategy": _FSDP,
    "pytorch.strategies.DDPShardedStrategy": _SHARDED,
    "pytorch.strategies.DDPSpawnShardedStrategy": "Use strategy='ddp_sharded_spawn'.",
    "pytorch.strategies.DDPSpawnStrategy": "Use strategy='ddp_spawn', or DDPStrategy(start_method='spawn').",
    "pytorch.strategies.HivemindStrategy": _GONE,
    "pytorch.strategies.HorovodStrategy": _GONE,
    "pytorch.strategies.IPUStrategy": _GONE,
    "pytorch.strategies.TPUSpawnStrategy": _NO_TPU,
    "pytorch.strategies.fully_sharded_native": "FSDPStrategy is in lightning.pytorch.strategies.",
    "pytorch.strategies.launchers": _LAUNCHER,
    "pytorch.strategies.tpu_spawn": _NO_TPU,
    "pytorch.trainer.call": _CONNECTOR,
    "pytorch.trainer.configuration_validator": _CONNECTOR,
    "pytorch.trainer.connectors": _CONNECTOR,
    "pytorch.trainer.setup": _CONNECTOR,
    "pytorch.trainer.supporters": "CombinedLoader is in lightning.pytorch.utilities.combined_loader.",
    "pytorch.tuner.lr_finder": "Use LearningRateFinder, or Tuner(trainer).lr_find(...).",
    "pytorch.tuner.auto_gpu_select": "Use find_usable_cuda_devices of lightning.pytorch.accelerators.",
    "pytorch.utilities.AMPType": "Use trainer.precision.",
    "pytorch.utilities.DistributedType": "Use the class of trainer.strategy.",
    "pytorch.utilities.argparse": "Use LightningCLI, or build the Trainer yourself: Trainer(**vars(args)).",
    "pytorch.utilities.cli": "It is lightning.pytorch.cli now.",
    "pytorch.utilities.compile": "Use torch.compile(module), and module._orig_mod for the module inside.",
    "pytorch.utilities.consolidate_checkpoint": "Checkpoints of hasten are whole files: load them as they are.",
    "pytorch.utilities.deepspeed": "A checkpoint folder becomes one file with: hasten consolidate FOLDER.",
    "pytorch.utilities.device_parser": "It is lightning.fabric.utilities.device_parser now.",
    "pytorch.utilities.enums.AMPType": "Use trainer.precision.",
    "pytorch.utilities.enums.DistributedType": "Use the class of trainer.strategy.",
    "pytorch.utilities.logger": _FABRIC_LOGGER,
    "pytorch.utilities.meta": "Use trainer.init_module(), or torch.device('meta').",
    "pytorch.utilities.metrics": "Use self.log, which takes metrics of torchmetrics.",
    "pytorch.utilities.migration": "Checkpoints of Lightning 2.x are read as they are: pass ckpt_path.",
    "pytorch.utilities.model_registry": f"{_PRODUCT} {_FILES}",
    "pytorch.utilities.testing": _TESTS,
    "pytorch.utilities.types._PATH": "It is in lightning.fabric.utilities.types: str | pathlib.Path.",
    "pytorch.utilities.upgrade_checkpoint": "Checkpoints of Lightning 2.x are read as they are: pass ckpt_path.",
    "pytorch.utilities.xla_device": "Use XLAAccelerator.is_available().",
    "store": f"{_PRODUCT} {_FILES}",
}

# Packages of hosted products -> what to do where they are not installed.
PRODUCTS = {
    "lightning_app": _JOBS,
    "lightning_cloud": _JOBS,
    "lightning_sdk": _JOBS,
    "litlogger": _LOGGERS,
    "litmodels": _FILES,
}


def alternative_to(place: str) -> str | None:
    """Return what to use in place of a name or module, for instance ``"pytorch.metrics"``; None if nothing is known."""
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
