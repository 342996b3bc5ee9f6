"""Modules of ``lightning.pytorch``: the names each has, by the module of hasten in which they live.

``name`` is called the same in hasten, ``name=other`` is ``other`` there. Modules that only hold others have no names.
"""

from __future__ import annotations

_TOP = {"hasten": "Callback LightningDataModule LightningModule Trainer seed_everything"}
_RANK_ZERO = (
    "WarningCache rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only "
    "rank_zero_warn LightningDeprecationWarning _get_rank rank_zero_module"
)
_LOGGERS = "CSVLogger CometLogger LitLogger Logger MLFlowLogger NeptuneLogger TensorBoardLogger WandbLogger"
_PRECISIONS = (
    "BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision MixedPrecision Precision "
    "TransformerEnginePrecision XLAPrecision"
)
_CHECKPOINT_IO = "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO"
_ENVIRONMENTS = (
    "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment "
    "TorchElasticEnvironment XLAEnvironment"
)
_STRATEGIES = (
    "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy "
    "SingleDeviceXLAStrategy Strategy XLAStrategy"
)
_STEPS = "STEP_OUTPUT EVAL_DATALOADERS TRAIN_DATALOADERS _EVALUATE_OUTPUT _METRIC _NUMBER _PREDICT_OUTPUT"
_SCHEDULERS = (
    "LRSchedulerConfigType LRSchedulerPLType LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion "
    "OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig"
)
_PRECISION_INPUTS = (
    "_PRECISION_INPUT _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS "
    "_PRECISION_INPUT_STR_ALIAS_CONVERSION"
)

_CALLBACKS = {
    "": {
        "hasten.callbacks": "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback "
        "Checkpoint DeviceStatsMonitor EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback "
        "LearningRateFinder LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint "
        "ProgressBar RichModelSummary RichProgressBar SpikeDetection StochasticWeightAveraging TQDMProgressBar "
        "ThroughputMonitor Timer WeightAveraging"
    },
    "base": {"hasten.module.callback": "Callback"},
    "batch_size_finder": {"hasten.callbacks": "BatchSizeFinder"},
    "callback": {"hasten.module.callback": "Callback"},
    "checkpoint": {"hasten.callbacks": "Checkpoint"},
    "device_stats_monitor": {"hasten.callbacks": "DeviceStatsMonitor"},
    "early_stopping": {"hasten.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason"},
    "finetuning": {"hasten.callbacks.finetuning": "BackboneFinetuning BaseFinetuning multiplicative"},
    "gradient_accumulation_scheduler": {"hasten.callbacks": "GradientAccumulationScheduler"},
    "lambda_function": {"hasten.callbacks": "LambdaCallback"},
    "lr_finder": {"hasten.callbacks": "LearningRateFinder"},
    "lr_monitor": {"hasten.callbacks": "LearningRateMonitor"},
    "model_checkpoint": {"hasten.callbacks": "ModelCheckpoint"},
    "model_summary": {"hasten.callbacks": "ModelSummary"},
    "on_exception_checkpoint": {"hasten.callbacks": "OnExceptionCheckpoint"},
    "prediction_writer": {"hasten.callbacks.prediction_writer": "BasePredictionWriter WriteInterval"},
    "progress": {"hasten.callbacks": "ProgressBar RichProgressBar TQDMProgressBar"},
    "progress.base": {
        "hasten.callbacks": "ProgressBar",
        "hasten.callbacks.progress": "ProgressBarBase=ProgressBar get_standard_metrics",
    },
    "progress.progress_bar": {
        "hasten.callbacks": "ProgressBar",
        "hasten.callbacks.progress": "get_standard_metrics",
    },
    "progress.rich_progress": {"hasten.callbacks.rich_progress": "RichProgressBar RichProgressBarTheme"},
    "progress.tqdm_progress": {
        "hasten.callbacks": "TQDMProgressBar",
        "hasten.callbacks.tqdm_progress": "Tqdm",
        "hasten.callbacks.progress": "convert_inf",
    },
    "pruning": {"hasten.callbacks": "ModelPruning"},
    "rich_model_summary": {"hasten.callbacks": "RichModelSummary"},
    "spike": {"hasten.callbacks": "SpikeDetection"},
    "stochastic_weight_avg": {"hasten.callbacks": "StochasticWeightAveraging"},
    "throughput_monitor": {"hasten.callbacks": "ThroughputMonitor"},
    "timer": {"hasten.callbacks.timer": "Interval Timer"},
    "weight_averaging": {"hasten.callbacks": "EMAWeightAveraging WeightAveraging"},
}

_CORE = {
    "": {"hasten": "LightningDataModule LightningModule"},
    "datamodule": {"hasten.module.datamodule": "DataHooks LightningDataModule"},
    "hooks": {
        "hasten.module.datamodule": "DataHooks",
        "hasten.utilities.hooks": "CheckpointHooks ModelHooks",
    },
    "lightning": {"hasten": "LightningModule"},
    "mixins": {"hasten.module.hparams": "HyperparametersMixin"},
    "mixins.hparams_mixin": {"hasten.module.hparams": "HyperparametersMixin"},
    "module": {"hasten": "LightningModule"},
    "optimizer": {
        "hasten.optim": "LightningOptimizer=HastenOptimizer",
        "hasten.utilities.model_helpers": "do_nothing_closure",
    },
    "saving": {
        "hasten.utilities.saving": "convert load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_tags_csv "
        "save_hparams_to_yaml update_hparams get_filesystem pl_load=read"
    },
}

_LOGGER_MODULES = {
    "": {"hasten.loggers": _LOGGERS},
    "base": {"hasten.loggers.base": "DummyExperiment DummyLogger Logger rank_zero_experiment"},
    "comet": {"hasten.loggers": "CometLogger"},
    "csv_logs": {"hasten.loggers.csv": "CSVLogger ExperimentWriter"},
    "logger": {
        "hasten.loggers.base": "DummyExperiment DummyLogger Logger rank_zero_experiment",
        "hasten.utilities.data": "merge_dicts",
    },
    "litlogger": {"hasten.loggers": "LitLogger"},
    "mlflow": {"hasten.loggers": "MLFlowLogger"},
    "neptune": {"hasten.loggers": "NeptuneLogger"},
    "tensorboard": {"hasten.loggers": "TensorBoardLogger"},
    "wandb": {"hasten.loggers": "WandbLogger"},
}

_PLUGINS = {
    "": {
        "hasten.plugins": f"{_PRECISIONS} {_CHECKPOINT_IO} ClusterEnvironment LayerSync TorchSyncBatchNorm",
        "hasten.utilities.types": "_PLUGIN_INPUT",
    },
    "environments": {"hasten.plugins": _ENVIRONMENTS},
    "io": {"hasten.plugins": _CHECKPOINT_IO},
    "io.async_plugin": {"hasten.plugins": "AsyncCheckpointIO"},
    "io.checkpoint_plugin": {"hasten.plugins": "CheckpointIO"},
    "io.torch_plugin": {"hasten.plugins": "TorchCheckpointIO"},
    "io.xla_plugin": {"hasten.plugins": "XLACheckpointIO"},
    "layer_sync": {"hasten.plugins": "LayerSync TorchSyncBatchNorm"},
    "precision": {"hasten.plugins": _PRECISIONS},
    "precision.amp": {"hasten.plugins": "MixedPrecision"},
    "precision.bitsandbytes": {"hasten.plugins": "BitsandbytesPrecision"},
    "precision.deepspeed": {"hasten.plugins": "DeepSpeedPrecision"},
    "precision.double": {"hasten.plugins": "DoublePrecision"},
    "precision.fsdp": {"hasten.plugins": "FSDPPrecision"},
    "precision.half": {"hasten.plugins": "HalfPrecision"},
    "precision.precision": {"hasten.plugins": "Precision"},
    "precision.transformer_engine": {"hasten.plugins": "TransformerEnginePrecision"},
    "precision.xla": {"hasten.plugins": "XLAPrecision"},
}

_TRAINER = {
    "": {"hasten": "Trainer seed_everything"},
    "connectors": {},
    "connectors.accelerator_connector": {"hasten.utilities.types": f"_LITERAL_WARN {_PRECISION_INPUTS}"},
    "states": {"hasten.loops.states": "RunningStage TrainerFn TrainerState TrainerStatus"},
    "trainer": {"hasten": "Trainer"},
}

_UTILITIES = {
    "": {
        "hasten.utilities": "AttributeDict CombinedLoader GradClipAlgorithmType LightningEnum "
        "disable_possible_user_warnings find_shared_parameters grad_norm is_picklable is_shared_filesystem "
        "measure_flops move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn "
        "set_shared_parameters suggested_max_num_workers FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON"
    },
    "apply_func": {
        "hasten.utilities.data": "apply_to_collection",
        "hasten.utilities": "move_data_to_device",
    },
    "cloud_io": {"hasten.utilities.saving": "get_filesystem load=read load_=read _load=read"},
    "combined_loader": {"hasten.data.combined": "CombinedLoader"},
    "data": {
        "hasten.utilities": "suggested_max_num_workers AttributeDict",
        "hasten.utilities.data": "extract_batch_size has_iterable_dataset has_len has_len_all_ranks sized_len",
    },
    "distributed": {
        "hasten.utilities.rank_zero": "rank_zero_debug rank_zero_info rank_zero_only rank_zero_warn",
        "hasten.utilities.data": "is_shared_filesystem",
    },
    "enums": {"hasten.utilities.enums": "GradClipAlgorithmType LightningEnum"},
    "exceptions": {
        "hasten.utilities.exceptions": "MisconfigurationException SIGTERMException _TunerExitException",
    },
    "grads": {"hasten.utilities": "grad_norm"},
    "imports": {
        "hasten.utilities.imports": "_OMEGACONF_AVAILABLE _RICH_AVAILABLE _TORCHVISION_AVAILABLE "
        "_TORCH_GREATER_EQUAL_2_6 _TORCH_GREATER_EQUAL_2_8 _TORCHMETRICS_GREATER_EQUAL_1_0_0 "
        "_PYTHON_GREATER_EQUAL_3_11_0 RequirementCache module_available package_available"
    },
    "memory": {
        "hasten.utilities.memory": "garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error "
        "is_out_of_cpu_memory recursive_detach"
    },
    "model_helpers": {"hasten.utilities.model_helpers": "get_torchvision_model is_overridden"},
    "model_summary": {
        "hasten.report.summary": "LayerSummary ModelSummary get_human_readable_count=human_readable parse_batch_shape "
        "summarize",
        "hasten.utilities.model_helpers": "DeepSpeedSummary get_formatted_model_size",
    },
    "model_summary.model_summary": {
        "hasten.report.summary": "LayerSummary ModelSummary get_human_readable_count=human_readable parse_batch_shape "
        "summarize",
        "hasten.utilities.model_helpers": "get_formatted_model_size",
    },
    "model_summary.model_summary_deepspeed": {"hasten.utilities.model_helpers": "DeepSpeedSummary"},
    "parameter_tying": {"hasten.utilities": "find_shared_parameters set_shared_parameters"},
    "parsing": {
        "hasten.utilities.parsing": "clean_namespace collect_init_args get_init_args is_picklable lightning_getattr "
        "lightning_hasattr lightning_setattr save_hyperparameters",
        "hasten.module.hparams": "AttributeDict",
    },
    "rank_zero": {"hasten.utilities.rank_zero": _RANK_ZERO},
    "seed": {
        "hasten.seed": "isolate_rng reset_seed seed_everything",
        "hasten.utilities.samplers": "pl_worker_init_function",
    },
    "signature_utils": {"hasten.utilities.model_helpers": "is_param_in_hook_signature"},
    "types": {
        "hasten.utilities.types": f"{_STEPS} {_SCHEDULERS} DistributedDataParallel _SizedIterable",
        "hasten.optim": "LRSchedulerConfig",
    },
    "upgrade_checkpoint": {},
    "warnings": {
        "hasten.utilities.warnings": "PossibleUserWarning WarningCache",
        "hasten.utilities.rank_zero": "LightningDeprecationWarning rank_zero_deprecation rank_zero_warn",
    },
}


def _under(package: str, rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {f"{package}.{name}" if name else package: row for name, row in rows.items()}


PYTORCH: dict[str, dict[str, str]] = {
    "pytorch": {
        **_TOP,
        "hasten.compat.version": "__version__=VERSION",
        "hasten.utilities.rank_zero": "_logger=log",
    },
    "pytorch.accelerators": {
        "hasten.accelerators": "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator "
        "find_usable_cuda_devices",
        "hasten.utilities.registries": "AcceleratorRegistry",
    },
    "pytorch.accelerators.accelerator": {"hasten.accelerators": "Accelerator"},
    "pytorch.accelerators.cpu": {
        "hasten.accelerators": "CPUAccelerator",
        "hasten.callbacks.device_stats": "get_cpu_stats",
    },
    "pytorch.accelerators.cuda": {"hasten.accelerators": "CUDAAccelerator"},
    "pytorch.accelerators.mps": {"hasten.accelerators": "MPSAccelerator"},
    "pytorch.accelerators.xla": {"hasten.accelerators": "XLAAccelerator"},
    **_under("pytorch.callbacks", _CALLBACKS),
    "pytorch.cli": {
        "hasten.cli": "ArgsType LRSchedulerCallable LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion "
        "LightningArgumentParser LightningCLI ModuleType Namespace OptimizerCallable ReduceLROnPlateau "
        "SaveConfigCallback instantiate_class instantiate_module"
    },
    **_under("pytorch.core", _CORE),
    "pytorch.demos": {
        "hasten.demos": "BoringDataModule BoringModel DemoModel LightningLSTM LightningTransformer SequenceSampler "
        "SimpleLSTM Transformer WikiText2"
    },
    "pytorch.demos.boring_classes": {
        "hasten.demos.boring_classes": "BoringDataModule BoringDataModuleNoLen BoringModel DemoModel "
        "IterableBoringDataModule ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset "
        "RandomIterableDatasetWithLen"
    },
    "pytorch.demos.lstm": {"hasten.demos.lstm": "LightningLSTM SequenceSampler SimpleLSTM"},
    "pytorch.demos.transformer": {
        "hasten.demos.transformer": "Dictionary LightningTransformer PositionalEncoding Transformer WikiText2 tokenize"
    },
    **_under("pytorch.loggers", _LOGGER_MODULES),
    "pytorch.loops": {
        "hasten.trainer.loop_views": "_EvaluationLoop=EvaluationLoop _FitLoop=FitLoop _PredictionLoop=PredictionLoop "
        "_TrainingEpochLoop=TrainingEpochLoop"
    },
    "pytorch.loops.evaluation_loop": {"hasten.trainer.loop_views": "_EvaluationLoop=EvaluationLoop"},
    "pytorch.loops.fit_loop": {"hasten.trainer.loop_views": "_FitLoop=FitLoop"},
    "pytorch.loops.prediction_loop": {"hasten.trainer.loop_views": "_PredictionLoop=PredictionLoop"},
    "pytorch.loops.training_epoch_loop": {
        "hasten.trainer.loop_views": "_TrainingEpochLoop=TrainingEpochLoop"
    },
    "pytorch.overrides": {},
    "pytorch.overrides.distributed": {"hasten.utilities.samplers": "UnrepeatedDistributedSampler"},
    **_under("pytorch.plugins", _PLUGINS),
    "pytorch.profilers": {
        "hasten.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler"
    },
    "pytorch.profilers.advanced": {"hasten.profilers": "AdvancedProfiler"},
    "pytorch.profilers.base": {"hasten.profilers": "PassThroughProfiler Profiler"},
    "pytorch.profilers.profiler": {"hasten.profilers": "Profiler"},
    "pytorch.profilers.pytorch": {
        "hasten.profilers": "PyTorchProfiler",
        "hasten.profilers.module_names": "RegisterRecordFunction",
    },
    "pytorch.profilers.simple": {"hasten.profilers": "SimpleProfiler"},
    "pytorch.profilers.xla": {"hasten.profilers": "XLAProfiler"},
    "pytorch.strategies": {
        "hasten.strategies": _STRATEGIES,
        "hasten.utilities.registries": "StrategyRegistry",
    },
    "pytorch.strategies.ddp": {"hasten.strategies": "DDPStrategy"},
    "pytorch.strategies.deepspeed": {"hasten.strategies": "DeepSpeedStrategy"},
    "pytorch.strategies.fsdp": {"hasten.strategies": "FSDPStrategy"},
    "pytorch.strategies.launchers": {},
    "pytorch.strategies.model_parallel": {"hasten.strategies": "ModelParallelStrategy"},
    "pytorch.strategies.parallel": {"hasten.strategies": "ParallelStrategy"},
    "pytorch.strategies.single_device": {"hasten.strategies": "SingleDeviceStrategy"},
    "pytorch.strategies.single_xla": {"hasten.strategies": "SingleDeviceXLAStrategy"},
    "pytorch.strategies.strategy": {"hasten.strategies": "Strategy"},
    "pytorch.strategies.xla": {"hasten.strategies": "XLAStrategy"},
    **_under("pytorch.trainer", _TRAINER),
    "pytorch.tuner": {"hasten.tuner": "Tuner"},
    "pytorch.tuner.lr_finder": {"hasten.tuner.lr_find": "_LRFinder=LRFinder"},
    "pytorch.tuner.tuning": {"hasten.tuner": "Tuner"},
    **_under("pytorch.utilities", _UTILITIES),
}
