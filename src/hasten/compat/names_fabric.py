"""Modules of ``lightning.fabric``, and those of ``lightning`` itself; see ``names_pytorch``."""

from __future__ import annotations

from hasten.compat.names_pytorch import _ENVIRONMENTS, _PRECISION_INPUTS, _PRECISIONS, _RANK_ZERO

_ACCELERATORS = "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator"
_STRATEGIES = (
    "DDPStrategy DataParallelStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy "
    "SingleDeviceStrategy SingleDeviceXLAStrategy Strategy XLAFSDPStrategy XLAStrategy"
)

_UTILITIES = {
    "": {
        "hasten.utilities": "AttributeDict LightningEnum disable_possible_user_warnings is_shared_filesystem "
        "measure_flops move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn "
        "suggested_max_num_workers",
        "hasten.report.throughput": "Throughput ThroughputMonitor",
    },
    "apply_func": {
        "hasten.utilities": "move_data_to_device",
        "hasten.utilities.data": "apply_to_collection convert_tensors_to_scalars convert_to_tensors",
    },
    "cloud_io": {
        "hasten.utilities.saving": "get_filesystem _load=read _atomic_save=write _is_dir=is_folder "
        "_is_local_file_protocol=is_local"
    },
    "consolidate_checkpoint": {},
    "data": {
        "hasten.utilities": "AttributeDict suggested_max_num_workers",
        "hasten.utilities.data": "has_iterable_dataset has_len sized_len",
    },
    "device_dtype_mixin": {"hasten.utilities.device_dtype": "_DeviceDtypeModuleMixin=DeviceDtypeMixin"},
    "distributed": {
        "hasten.utilities.data": "is_shared_filesystem",
        "hasten.utilities.samplers": "DistributedSamplerWrapper",
        "hasten.machine.collectives": "_distributed_is_initialized=joined",
    },
    "enums": {"hasten.utilities.enums": "LightningEnum"},
    "exceptions": {"hasten.utilities.exceptions": "MisconfigurationException"},
    "imports": {
        "hasten.utilities.imports": "_IS_WINDOWS _NUMPY_AVAILABLE _TORCH_GREATER_EQUAL_2_2 _TORCH_GREATER_EQUAL_2_3 "
        "_TORCH_GREATER_EQUAL_2_4 _TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6 RequirementCache package_available"
    },
    "logger": {
        "hasten.loggers.base": "_add_prefix=with_prefix _convert_params=as_dict _flatten_dict=flat",
        "hasten.utilities.data": "_sanitize_params=as_text",
    },
    "optimizer": {"hasten.utilities.data": "_optimizer_to_device=optimizer_to_device"},
    "rank_zero": {"hasten.utilities.rank_zero": _RANK_ZERO},
    "seed": {
        "hasten.seed": "reset_seed seed_everything",
        "hasten.utilities.data": "max_seed_value min_seed_value",
        "hasten.utilities.samplers": "pl_worker_init_function",
    },
    "spike": {"hasten.callbacks.spike": "SpikeDetection TrainingSpikeException"},
    "throughput": {
        "hasten.report.throughput": "Throughput ThroughputMonitor measure_flops",
        "hasten.report.peaks": "get_available_flops",
    },
    "types": {
        "hasten.utilities.types": "LRScheduler Optimizable ProcessGroup ReduceLROnPlateau ReduceOp Steppable "
        "_DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH _Stateful"
    },
    "warnings": {"hasten.utilities.warnings": "PossibleUserWarning disable_possible_user_warnings"},
}

FABRIC: dict[str, dict[str, str]] = {
    "fabric": {
        "hasten": "Fabric seed_everything",
        "hasten.fabric.wrappers": "is_wrapped",
        "hasten.compat.version": "__version__=VERSION",
    },
    "fabric.accelerators": {
        "hasten.accelerators": f"{_ACCELERATORS} find_usable_cuda_devices",
        "hasten.utilities.registries": "ACCELERATOR_REGISTRY=AcceleratorRegistry",
    },
    "fabric.accelerators.accelerator": {"hasten.accelerators": "Accelerator"},
    "fabric.accelerators.cpu": {"hasten.accelerators": "CPUAccelerator"},
    "fabric.accelerators.cuda": {
        "hasten.accelerators": "CUDAAccelerator find_usable_cuda_devices",
        "hasten.utilities.device_dtype": "is_cuda_available num_cuda_devices",
    },
    "fabric.accelerators.mps": {"hasten.accelerators": "MPSAccelerator"},
    "fabric.accelerators.xla": {"hasten.accelerators": "XLAAccelerator"},
    "fabric.connector": {"hasten.utilities.types": f"{_PRECISION_INPUTS} _PLUGIN_INPUT"},
    "fabric.fabric": {"hasten": "Fabric"},
    "fabric.loggers": {
        "hasten.fabric.loggers": "CSVLogger TensorBoardLogger",
        "hasten.loggers": "Logger",
    },
    "fabric.loggers.csv_logs": {"hasten.fabric.loggers": "CSVLogger"},
    "fabric.loggers.logger": {
        "hasten.loggers.base": "Logger _DummyExperiment=DummyExperiment rank_zero_experiment"
    },
    "fabric.loggers.tensorboard": {"hasten.fabric.loggers": "TensorBoardLogger"},
    "fabric.plugins": {
        "hasten.plugins": f"{_PRECISIONS} CheckpointIO ClusterEnvironment TorchCheckpointIO XLACheckpointIO"
    },
    "fabric.plugins.environments": {"hasten.plugins": _ENVIRONMENTS},
    "fabric.plugins.environments.cluster_environment": {"hasten.plugins": "ClusterEnvironment"},
    "fabric.plugins.environments.kubeflow": {"hasten.plugins": "KubeflowEnvironment"},
    "fabric.plugins.environments.lightning": {
        "hasten.plugins": "LightningEnvironment",
        "hasten.machine.cluster": "find_free_network_port=find_free_port",
    },
    "fabric.plugins.environments.lsf": {"hasten.plugins": "LSFEnvironment"},
    "fabric.plugins.environments.mpi": {"hasten.plugins": "MPIEnvironment"},
    "fabric.plugins.environments.slurm": {"hasten.plugins": "SLURMEnvironment"},
    "fabric.plugins.environments.torchelastic": {"hasten.plugins": "TorchElasticEnvironment"},
    "fabric.plugins.environments.xla": {"hasten.plugins": "XLAEnvironment"},
    "fabric.plugins.io": {"hasten.plugins": "CheckpointIO TorchCheckpointIO XLACheckpointIO"},
    "fabric.plugins.io.checkpoint_io": {"hasten.plugins": "CheckpointIO"},
    "fabric.plugins.io.torch_io": {"hasten.plugins": "TorchCheckpointIO"},
    "fabric.plugins.io.xla": {"hasten.plugins": "XLACheckpointIO"},
    "fabric.plugins.precision": {"hasten.plugins": _PRECISIONS},
    "fabric.plugins.precision.amp": {"hasten.plugins": "MixedPrecision"},
    "fabric.plugins.precision.bitsandbytes": {"hasten.plugins": "BitsandbytesPrecision"},
    "fabric.plugins.precision.deepspeed": {"hasten.plugins": "DeepSpeedPrecision"},
    "fabric.plugins.precision.double": {"hasten.plugins": "DoublePrecision"},
    "fabric.plugins.precision.fsdp": {"hasten.plugins": "FSDPPrecision"},
    "fabric.plugins.precision.half": {"hasten.plugins": "HalfPrecision"},
    "fabric.plugins.precision.precision": {
        "hasten.plugins": "Precision",
        "hasten.utilities.types": _PRECISION_INPUTS,
    },
    "fabric.plugins.precision.transformer_engine": {"hasten.plugins": "TransformerEnginePrecision"},
    "fabric.plugins.precision.xla": {"hasten.plugins": "XLAPrecision"},
    "fabric.strategies": {
        "hasten.strategies": _STRATEGIES,
        "hasten.utilities.registries": "STRATEGY_REGISTRY=StrategyRegistry",
    },
    "fabric.strategies.ddp": {"hasten.strategies": "DDPStrategy"},
    "fabric.strategies.deepspeed": {"hasten.strategies": "DeepSpeedStrategy"},
    "fabric.strategies.dp": {"hasten.strategies": "DataParallelStrategy"},
    "fabric.strategies.fsdp": {"hasten.strategies": "FSDPStrategy"},
    "fabric.strategies.model_parallel": {"hasten.strategies": "ModelParallelStrategy"},
    "fabric.strategies.parallel": {"hasten.strategies": "ParallelStrategy"},
    "fabric.strategies.single_device": {"hasten.strategies": "SingleDeviceStrategy"},
    "fabric.strategies.single_xla": {"hasten.strategies": "SingleDeviceXLAStrategy"},
    "fabric.strategies.strategy": {"hasten.strategies": "Strategy"},
    "fabric.strategies.xla": {"hasten.strategies": "XLAStrategy"},
    "fabric.strategies.xla_fsdp": {"hasten.strategies": "XLAFSDPStrategy"},
    **{f"fabric.utilities.{name}" if name else "fabric.utilities": row for name, row in _UTILITIES.items()},
    "fabric.wrappers": {
        "hasten.fabric.wrappers": "_FabricDataLoader=FabricDataLoader _FabricModule=FabricModule "
        "_FabricOptimizer=FabricOptimizer is_wrapped"
    },
}
