"""Names of strategies, accelerators and modules of other libraries: why hasten does not have each, and what to write.

``hasten/resolve.py`` makes its messages from these tables, ``scripts/strategy_names.py`` ``docs/strategy_names.md``.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Refused(NamedTuple):
    """A name that is refused."""

    source: str
    # One sentence.
    reason: str
    # The arguments of Trainer or Fabric to write in its place; empty if a sentence of ``reason`` says it.
    write: str

    def parts(self, devices: int = 8) -> tuple[str, str]:
        """Return the reason, and the sentence that says what to write; "" where the reason says it."""
        if not self.write:
            return self.reason, ""
        write = self.write
        if (kind := re.search(r"\w+Strategy(?=\()", write)) is not None:
            # This import is the same for programs that import Lightning: its class of that name takes less.
            more = "devices=2, " if devices == 1 and "tensor_parallel_size" in write else ""
            write = write.replace("tensor_parallel_size=8", f"tensor_parallel_size={max(2, devices)}")
            write = f"`from hasten.strategies import {kind[0]}` and {more}{write}"
        return self.reason, f"Write {write}."

    def message(self, devices: int = 8) -> str:
        """Return the reason and what to write, on a machine with so many devices."""
        return " ".join(self.parts(devices)).strip()


_PL1, _PL2 = "Lightning 1.x", "Lightning 2.x"
_LEGACY = "Lightning 1.x, Fabric"
_TORCH = "torch"
_ACCELERATE = "Accelerate"

_DDP, _FSDP, _SHARDED = "strategy='ddp'", "strategy='fsdp'", "strategy='ddp_sharded'"
_SPLIT = "strategy=ModelParallelStrategy(tensor_parallel_size=8, plan='auto')"
_KEEPS = "strategy=FSDPStrategy(sharding_strategy='SHARD_GRAD_OP')"
_HYBRID = "strategy=FSDPStrategy(sharding_strategy='HYBRID_SHARD')"
_GPU = "accelerator='gpu'"

_DATA_PARALLEL = (
    "DataParallel copies the model to every device in every step and computes in threads of one process; DDP has one "
    "process per device, does neither, and gives the same gradients."
)
_OLD_NATIVE = "That was the name of torch's FSDP beside FairScale's; there is one FSDP now."
_OLD_SPAWN = "Discontinued: FairScale's sharded DDP is no longer developed."
_LAYERS = "The sizes of the groups have to be given with an object."
_RPC = "Discontinued: FairScale's pipeline is no longer developed."
_PIPELINE = "The number of processes for the layers has to be given with an object."
_STAGES = "strategy=MeshStrategy(pipeline=2)"
_CONTEXT = "The number of processes for a sequence has to be given with an object."
_SEQUENCES = "strategy=MeshStrategy(context=2)"
_RAY = "Ray starts the processes, and the strategy is the usual one: use ray.train.torch.TorchTrainer."
_HPU = "Discontinued: the strategies for Habana's HPUs were a plugin of Lightning, which is no longer developed."
_XLA_DEBUG = "The environment variable PT_XLA_DEBUG_LEVEL=1 prints what XLA compiles, with any strategy."
_CUSTOM = "hasten has no class for such devices: subclass hasten.accelerators.Accelerator and pass the object."
_DEVICES = "The kind of device is another argument."


def _gone(what: str) -> str:
    return f"Discontinued: {what} is no longer developed."


STRATEGIES: dict[str, Refused] = {
    "dp": Refused(_LEGACY, _DATA_PARALLEL, _DDP),
    "data_parallel": Refused(_TORCH, _DATA_PARALLEL, _DDP),
    "ddp2": Refused(_PL1, "Discontinued: it was DataParallel within a machine and DDP between machines.", _DDP),
    "ddp_cpu": Refused(_PL1, _DEVICES, "accelerator='cpu', strategy='ddp', devices=2"),
    "ddp_cpu_spawn": Refused(_PL1, _DEVICES, "accelerator='cpu', strategy='ddp_spawn', devices=2"),
    "ddp_gpu": Refused(_PL1, _DEVICES, "accelerator='gpu', strategy='ddp'"),
    "ddp_slurm": Refused(_PL1, "Processes that srun has started are recognized.", _DDP),
    "ddp_torchelastic": Refused(_PL1, "Processes that torchrun has started are recognized.", _DDP),
    "ddp_fully_sharded": Refused(_PL1, _gone("FairScale's FSDP"), _FSDP),
    "ddp_sequential": Refused(_PL1, _RPC, _SPLIT),
    "rpc": Refused(_PL1, _RPC, _SPLIT),
    "rpc_sequential": Refused(_PL1, _RPC, _SPLIT),
    "sharded": Refused(_PL1, _OLD_SPAWN, _SHARDED),
    "sharded_spawn": Refused(_PL1, _OLD_SPAWN, "strategy='ddp_sharded_spawn'"),
    "fairscale": Refused("FairScale", _OLD_SPAWN, _SHARDED),
    "fsdp_native": Refused(_PL1, _OLD_NATIVE, _FSDP),
    "fsdp_native_full_shard_offload": Refused(_PL1, _OLD_NATIVE, "strategy='fsdp_cpu_offload'"),
    "fsdp1": Refused(_TORCH, "torch's first FSDP is deprecated; fully_shard gives the same results.", _FSDP),
    "fully_shard": Refused(_TORCH, "That is the function; the strategy that calls it has another name.", _FSDP),
    "full_shard": Refused(_TORCH, "It is a kind of FSDP.", "strategy=FSDPStrategy(sharding_strategy='FULL_SHARD')"),
    "shard_grad_op": Refused(_TORCH, "It is a kind of FSDP.", _KEEPS),
    "hybrid_shard": Refused(_TORCH, "It is a kind of FSDP.", _HYBRID),
    "hsdp": Refused(_TORCH, "It is a kind of FSDP.", _HYBRID),
    "no_shard": Refused(_TORCH, "FSDP without shards is DDP.", _DDP),
    "zero": Refused("ZeRO", "ZeRO has three stages; the first divides optimizer states.", _SHARDED),
    "zero1": Refused("ZeRO", "Its first stage divides optimizer states.", _SHARDED),
    "zero2": Refused(
        "ZeRO", "Closest to its second stage is FSDP that keeps gathered parameters until backward.", _KEEPS
    ),
    "zero3": Refused("ZeRO", "Its third stage divides parameters, as FSDP does.", _FSDP),
    "model_parallel": Refused(_PL2, _LAYERS, _SPLIT),
    "tensor_parallel": Refused(_TORCH, _LAYERS, _SPLIT),
    "tp": Refused(_ACCELERATE, _LAYERS, _SPLIT),
    "sequence_parallel": Refused(
        _TORCH, _LAYERS, "strategy=ModelParallelStrategy(plan='auto', sequence_parallel=True)"
    ),
    "pipeline": Refused(_TORCH, _PIPELINE, _STAGES),
    "pipeline_parallel": Refused(_TORCH, _PIPELINE, _STAGES),
    "pp": Refused(_ACCELERATE, _PIPELINE, _STAGES),
    "context_parallel": Refused(_TORCH, _CONTEXT, _SEQUENCES),
    "cp": Refused(_ACCELERATE, _CONTEXT, _SEQUENCES),
    "expert_parallel": Refused(
        _TORCH,
        "The number of processes for the experts has to be given with an object.",
        "strategy=MeshStrategy(expert=2)",
    ),
    "megatron": Refused("NeMo", "Megatron has its own layers; torch splits your model's.", _SPLIT),
    "megatron_lm": Refused(_ACCELERATE, "Megatron has its own layers; torch splits your model's.", _SPLIT),
    "nlp_ddp": Refused("NeMo", "It was DDP between groups that split layers.", _SPLIT),
    "bagua": Refused(_LEGACY, _gone("Bagua"), _DDP),
    "colossalai": Refused(_LEGACY, _gone("the plugin for Colossal-AI"), _FSDP),
    "horovod": Refused(_LEGACY, _gone("Horovod"), _DDP),
    "byteps": Refused("BytePS", _gone("BytePS"), _DDP),
    "hivemind": Refused(_LEGACY, _gone("the plugin for Hivemind"), _DDP),
    "collaborative": Refused(_PL1, _gone("the plugin for Hivemind"), _DDP),
    "smddp": Refused(
        "SageMaker",
        "SageMaker's library is a backend of torch: import it, and pass process_group_backend='smddp' to DDPStrategy.",
        _DDP,
    ),
    "ddp_ray": Refused("Ray Lightning", _RAY, _DDP),
    "ddp_spawn_ray": Refused("Ray Lightning", _RAY, _DDP),
    "horovod_ray": Refused("Ray Lightning", _gone("Horovod"), _DDP),
    "ddp_sharded_ray": Refused("Ray Lightning", _RAY, _SHARDED),
    "ray": Refused("Ray", _RAY, _DDP),
    "local_sgd": Refused(
        _ACCELERATE,
        "Gradients are averaged in every step here; accumulate to average them less often.",
        "strategy='ddp', accumulate_grad_batches=8",
    ),
    "thunder_ddp": Refused(
        "Lightning Thunder",
        "Thunder compiles; here, compiling is the argument compile=.",
        "strategy='ddp', compile=True",
    ),
    "thunder_fsdp": Refused(
        "Lightning Thunder",
        "Thunder compiles; here, compiling is the argument compile=.",
        "strategy='fsdp', compile='regional'",
    ),
    "ipu_strategy": Refused(_LEGACY, _gone("Graphcore's plugin"), _GPU),
    "hpu_parallel": Refused(_LEGACY, _HPU, f"{_GPU}, {_DDP}"),
    "hpu_single": Refused(_LEGACY, _HPU, _GPU),
    "single_hpu": Refused(_PL1, _HPU, _GPU),
    "hpu_fsdp": Refused("Lightning Habana", _HPU, f"{_GPU}, {_FSDP}"),
    "hpu_deepspeed": Refused("Lightning Habana", _HPU, f"{_GPU}, {_FSDP}"),
    "tpu_spawn": Refused(_PL1, "It has another name now.", "strategy='xla'"),
    "tpu_spawn_debug": Refused(_PL1, _XLA_DEBUG, "strategy='xla'"),
    "single_tpu": Refused(_PL1, "It has another name now.", "strategy='single_xla'"),
    "xla_debug": Refused(_PL2, _XLA_DEBUG, "strategy='xla'"),
    "torchft": Refused(
        "torchft",
        "Processes that are lost start again and continue from the newest checkpoint: hasten launch --restarts.",
        _DDP,
    ),
    "multi_npu": Refused(_ACCELERATE, _CUSTOM, ""),
    "multi_mlu": Refused(_ACCELERATE, _CUSTOM, ""),
    "multi_musa": Refused(_ACCELERATE, _CUSTOM, ""),
    "multi_sdaa": Refused(_ACCELERATE, _CUSTOM, ""),
    "multi_xpu": Refused(_ACCELERATE, _CUSTOM, ""),
    "multi_hpu": Refused(_ACCELERATE, _HPU, f"{_GPU}, {_DDP}"),
    "multi_gpu": Refused(_ACCELERATE, _DEVICES, f"{_GPU}, {_DDP}"),
    "multi_cpu": Refused(_ACCELERATE, _DEVICES, "accelerator='cpu', strategy='ddp', devices=2"),
    "no": Refused(_ACCELERATE, "One device is called single_device here.", "strategy='single_device', devices=1"),
}

ACCELERATORS: dict[str, Refused] = {
    "ipu": Refused(_LEGACY, _gone("Graphcore's plugin"), _GPU),
    "graphcore": Refused("Graphcore", _gone("Graphcore's plugin"), _GPU),
    "hpu": Refused(_LEGACY, _gone("the plugin for Habana's HPUs"), _GPU),
    "gaudi": Refused("Habana", _gone("the plugin for Habana's HPUs"), _GPU),
    "rocm": Refused(_TORCH, "torch's ROCm build calls AMD's GPUs cuda.", _GPU),
    "hip": Refused(_TORCH, "torch's ROCm build calls AMD's GPUs cuda.", _GPU),
    "metal": Refused("Apple", "torch calls it mps.", "accelerator='mps'"),
    "xpu": Refused(_TORCH, _CUSTOM, ""),
    "npu": Refused(_ACCELERATE, _CUSTOM, ""),
    "mlu": Refused(_ACCELERATE, _CUSTOM, ""),
    "musa": Refused(_ACCELERATE, _CUSTOM, ""),
    "sdaa": Refused(_ACCELERATE, _CUSTOM, ""),
    "neuron": Refused("AWS", _CUSTOM, ""),
    "trainium": Refused("AWS", _CUSTOM, ""),
    "directml": Refused("Windows", _CUSTOM, ""),
}

_WITH_DDP = "Write Trainer(strategy='ddp'), or from hasten.strategies import DDPStrategy."
# Modules and classes of other libraries, most of them of Lightning 1, by their place in it, and what to write.
PLACES = {
    "accelerators.GPUAccelerator": "Write from hasten.accelerators import CUDAAccelerator.",
    "accelerators.gpu": "Write from hasten.accelerators import CUDAAccelerator.",
    "callbacks.base": "Write from hasten.callbacks import Callback.",
    "core": "Write from hasten import LightningModule, LightningDataModule.",
    "lite": "Write from hasten import Fabric.",
    "loggers.LightningLoggerBase": "Write from hasten.loggers import Logger.",
    "loggers.base": "Write from hasten.loggers import Logger.",
    "loggers.LoggerCollection": "Write Trainer(logger=[...]): trainer.loggers is that list.",
    "metrics": "Use the package torchmetrics: self.log takes its metrics.",
    "overrides": "Leave it out: strategy='ddp' wraps the module by itself.",
    "plugins.DDPPlugin": _WITH_DDP,
    "plugins.DeepSpeedPlugin": "Write from hasten.strategies import DeepSpeedStrategy.",
    "plugins.training_type": _WITH_DDP,
    "strategies.DDPFullyShardedNativeStrategy": "Write from hasten.strategies import FSDPStrategy.",
    "strategies.DDPSpawnStrategy": "Write Trainer(strategy='ddp_spawn').",
    "strategies.dp": _WITH_DDP,
    "trainer.states": "Write from hasten.utilities import RunningStage, TrainerFn.",
    "tuner.lr_finder": "Write from hasten.tuner import Tuner.",
    "utilities.cli": "Write from hasten.cli import LightningCLI.",
    "utilities.distributed": "Write from hasten.utilities import rank_zero_only.",
    "utilities.seed": "Write from hasten import seed_everything.",
}
