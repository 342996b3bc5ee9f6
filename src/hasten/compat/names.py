"""The names of Lightning, by module, and where they live in hasten."""

from __future__ import annotations

# What packages compare with: `lightning.__version__` and `importlib.metadata.version("lightning")`.
VERSION = "2.6.6"

# "module of hasten: names"; ``name=other`` is called ``other`` in hasten. A section ``[module]`` is for that module of
# Lightning and those below it, where a name means another object than elsewhere. Indented lines continue.
_HOMES = """
hasten: Callback Fabric LightningDataModule LightningModule seed_everything Trainer
hasten.accelerators: Accelerator CPUAccelerator CUDAAccelerator find_usable_cuda_devices MPSAccelerator XLAAccelerator
hasten.callbacks: BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Checkpoint DeviceStatsMonitor
    EarlyStopping EMAWeightAveraging GradientAccumulationScheduler LambdaCallback LearningRateFinder
    LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary
    RichProgressBar SpikeDetection StochasticWeightAveraging ThroughputMonitor Timer TQDMProgressBar WeightAveraging
hasten.callbacks.device_stats: get_cpu_stats
hasten.callbacks.early_stopping: EarlyStoppingReason
hasten.callbacks.finetuning: multiplicative
hasten.callbacks.prediction_writer: WriteInterval
hasten.callbacks.progress: convert_inf get_standard_metrics ProgressBarBase=ProgressBar
hasten.callbacks.rich_progress: RichProgressBarTheme
hasten.callbacks.spike: TrainingSpikeException
hasten.callbacks.timer: Interval
hasten.callbacks.tqdm_progress: Tqdm
hasten.cli: ArgsType instantiate_class instantiate_module LightningArgumentParser LightningCLI LRSchedulerCallable
    ModuleType Namespace OptimizerCallable SaveConfigCallback
hasten.compat.names: __version__=VERSION
hasten.demos: BoringDataModule BoringModel DemoModel LightningLSTM LightningTransformer SequenceSampler SimpleLSTM
    Transformer WikiText2
hasten.demos.boring_classes: BoringDataModuleNoLen IterableBoringDataModule ManualOptimBoringModel Net RandomDataset
    RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen
hasten.demos.transformer: Dictionary PositionalEncoding tokenize
hasten.fabric.wrappers: is_wrapped _FabricDataLoader=FabricDataLoader _FabricModule=FabricModule
    _FabricOptimizer=FabricOptimizer
hasten.loggers: CometLogger CSVLogger LitLogger Logger MLFlowLogger NeptuneLogger TensorBoardLogger WandbLogger
hasten.loggers.base: DummyExperiment DummyLogger rank_zero_experiment _add_prefix=with_prefix _convert_params=as_dict
    _DummyExperiment=DummyExperiment _flatten_dict=flat
hasten.loggers.csv: ExperimentWriter
hasten.loops.progress: RunningStage TrainerFn TrainerState TrainerStatus
hasten.machine.cluster: find_free_network_port=find_free_port
hasten.machine.collectives: _distributed_is_initialized=joined
hasten.module.datamodule: DataHooks
hasten.module.hparams: HyperparametersMixin
hasten.optim: LightningOptimizer=HastenOptimizer LRSchedulerConfig
hasten.plugins: AsyncCheckpointIO BitsandbytesPrecision CheckpointIO ClusterEnvironment DeepSpeedPrecision
    DoublePrecision FSDPPrecision HalfPrecision KubeflowEnvironment LayerSync LightningEnvironment LSFEnvironment
    MixedPrecision MPIEnvironment Precision SLURMEnvironment TorchCheckpointIO TorchElasticEnvironment
    TorchSyncBatchNorm TransformerEnginePrecision XLACheckpointIO XLAEnvironment XLAPrecision
hasten.profilers: AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler
hasten.profilers.pytorch: RegisterRecordFunction
hasten.report.peaks: get_available_flops
hasten.report.summary: get_human_readable_count=human_readable LayerSummary parse_batch_shape summarize
hasten.report.throughput: Throughput
hasten.seed: isolate_rng reset_seed
hasten.strategies: DataParallelStrategy DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy
    ParallelStrategy SingleDeviceStrategy SingleDeviceXLAStrategy Strategy XLAFSDPStrategy XLAStrategy
hasten.trainer.loop_views: _EvaluationLoop=EvaluationLoop _FitLoop=FitLoop _PredictionLoop=PredictionLoop
    _TrainingEpochLoop=TrainingEpochLoop
hasten.tuner: Tuner
hasten.tuner.lr_find: _LRFinder=LRFinder
hasten.utilities: AttributeDict CombinedLoader disable_possible_user_warnings find_shared_parameters FLOAT16_EPSILON
    FLOAT32_EPSILON FLOAT64_EPSILON grad_norm GradClipAlgorithmType is_picklable is_shared_filesystem LightningEnum
    measure_flops move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn
    set_shared_parameters suggested_max_num_workers
hasten.utilities.data: apply_to_collection convert_tensors_to_scalars convert_to_tensors DistributedSamplerWrapper
    extract_batch_size has_iterable_dataset has_len has_len_all_ranks max_seed_value merge_dicts min_seed_value
    pl_worker_init_function sized_len UnrepeatedDistributedSampler _optimizer_to_device=optimizer_to_device
    _sanitize_params=as_text
hasten.utilities.enums: ACCELERATOR_REGISTRY=AcceleratorRegistry AcceleratorRegistry
    STRATEGY_REGISTRY=StrategyRegistry StrategyRegistry
hasten.utilities.exceptions: MisconfigurationException SIGTERMException _TunerExitException
hasten.utilities.hooks: CheckpointHooks ModelHooks
hasten.utilities.imports: module_available package_available RequirementCache _IS_WINDOWS _NUMPY_AVAILABLE
    _OMEGACONF_AVAILABLE _PYTHON_GREATER_EQUAL_3_11_0 _RICH_AVAILABLE _TORCH_GREATER_EQUAL_2_2
    _TORCH_GREATER_EQUAL_2_3 _TORCH_GREATER_EQUAL_2_4 _TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6
    _TORCH_GREATER_EQUAL_2_8 _TORCHMETRICS_GREATER_EQUAL_1_0_0 _TORCHVISION_AVAILABLE
hasten.utilities.memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error
    is_out_of_cpu_memory recursive_detach
hasten.utilities.model_helpers: DeepSpeedSummary do_nothing_closure get_formatted_model_size get_torchvision_model
    is_cuda_available is_overridden is_param_in_hook_signature num_cuda_devices
    _DeviceDtypeModuleMixin=DeviceDtypeMixin
hasten.utilities.parsing: clean_namespace collect_init_args get_init_args lightning_getattr lightning_hasattr
    lightning_setattr save_hyperparameters
hasten.utilities.rank_zero: LightningDeprecationWarning rank_prefixed_message rank_zero_debug rank_zero_module
    WarningCache _get_rank _logger=log
hasten.utilities.saving: convert get_filesystem load=read load_=read load_hparams_from_tags_csv load_hparams_from_yaml
    pl_load=read save_hparams_to_tags_csv save_hparams_to_yaml update_hparams _atomic_save=write _is_dir=is_folder
    _is_local_file_protocol=is_local _load=read
hasten.utilities.types: DistributedDataParallel EVAL_DATALOADERS LRScheduler LRSchedulerConfigType LRSchedulerPLType
    LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion Optimizable OptimizerConfig OptimizerLRScheduler
    OptimizerLRSchedulerConfig ProcessGroup ReduceLROnPlateau ReduceOp STEP_OUTPUT Steppable TRAIN_DATALOADERS _DEVICE
    _EVALUATE_OUTPUT _LITERAL_WARN _MAP_LOCATION_TYPE _METRIC _NUMBER _PARAMETERS _PATH _PLUGIN_INPUT _PRECISION_INPUT
    _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS _PRECISION_INPUT_STR_ALIAS_CONVERSION
    _PREDICT_OUTPUT _SizedIterable _Stateful
hasten.utilities.warnings: PossibleUserWarning
[fabric.loggers]
hasten.fabric.loggers: CSVLogger TensorBoardLogger
[fabric.utilities]
hasten.report.throughput: ThroughputMonitor
[pytorch.callbacks]
hasten.callbacks: Callback
[pytorch.cli]
hasten.cli: LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion ReduceLROnPlateau
[pytorch.core.datamodule]
hasten.module.datamodule: LightningDataModule
[pytorch.utilities]
hasten.report.summary: ModelSummary
"""

# "[package of Lightning] names", then "module: names" for its modules that are not packages themselves.
_MODULES = """
[] Callback Fabric LightningDataModule LightningModule seed_everything Trainer __version__
[fabric] Fabric is_wrapped seed_everything __version__
connector: _PLUGIN_INPUT _PRECISION_INPUT _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS
    _PRECISION_INPUT_STR_ALIAS_CONVERSION
fabric: Fabric; wrappers: is_wrapped _FabricDataLoader _FabricModule _FabricOptimizer
[fabric.accelerators] Accelerator ACCELERATOR_REGISTRY CPUAccelerator CUDAAccelerator find_usable_cuda_devices
    MPSAccelerator XLAAccelerator
accelerator: Accelerator; cpu: CPUAccelerator
cuda: CUDAAccelerator find_usable_cuda_devices is_cuda_available num_cuda_devices; mps: MPSAccelerator
xla: XLAAccelerator
[fabric.loggers] CSVLogger Logger TensorBoardLogger
csv_logs: CSVLogger; logger: Logger rank_zero_experiment _DummyExperiment; tensorboard: TensorBoardLogger
[fabric.plugins] BitsandbytesPrecision CheckpointIO ClusterEnvironment DeepSpeedPrecision DoublePrecision
    FSDPPrecision HalfPrecision MixedPrecision Precision TorchCheckpointIO TransformerEnginePrecision XLACheckpointIO
    XLAPrecision
[fabric.plugins.environments] ClusterEnvironment KubeflowEnvironment LightningEnvironment LSFEnvironment
    MPIEnvironment SLURMEnvironment TorchElasticEnvironment XLAEnvironment
cluster_environment: ClusterEnvironment; kubeflow: KubeflowEnvironment
lightning: find_free_network_port LightningEnvironment; lsf: LSFEnvironment; mpi: MPIEnvironment
slurm: SLURMEnvironment; torchelastic: TorchElasticEnvironment; xla: XLAEnvironment
[fabric.plugins.io] CheckpointIO TorchCheckpointIO XLACheckpointIO
checkpoint_io: CheckpointIO; torch_io: TorchCheckpointIO; xla: XLACheckpointIO
[fabric.plugins.precision] BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision
    MixedPrecision Precision TransformerEnginePrecision XLAPrecision
amp: MixedPrecision; bitsandbytes: BitsandbytesPrecision; deepspeed: DeepSpeedPrecision; double: DoublePrecision
fsdp: FSDPPrecision; half: HalfPrecision
precision: Precision _PRECISION_INPUT _PRECISION_INPUT_INT _PRECISION_INPUT_STR _PRECISION_INPUT_STR_ALIAS
    _PRECISION_INPUT_STR_ALIAS_CONVERSION
transformer_engine: TransformerEnginePrecision; xla: XLAPrecision
[fabric.strategies] DataParallelStrategy DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy
    ParallelStrategy SingleDeviceStrategy SingleDeviceXLAStrategy Strategy STRATEGY_REGISTRY XLAFSDPStrategy
    XLAStrategy
ddp: DDPStrategy; deepspeed: DeepSpeedStrategy; dp: DataParallelStrategy; fsdp: FSDPStrategy
model_parallel: ModelParallelStrategy; parallel: ParallelStrategy; single_device: SingleDeviceStrategy
single_xla: SingleDeviceXLAStrategy; strategy: Strategy; xla: XLAStrategy; xla_fsdp: XLAFSDPStrategy
[fabric.utilities] AttributeDict disable_possible_user_warnings is_shared_filesystem LightningEnum measure_flops
    move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn suggested_max_num_workers
    Throughput ThroughputMonitor
apply_func: apply_to_collection convert_tensors_to_scalars convert_to_tensors move_data_to_device
cloud_io: get_filesystem _atomic_save _is_dir _is_local_file_protocol _load; consolidate_checkpoint:
data: AttributeDict has_iterable_dataset has_len sized_len suggested_max_num_workers
device_dtype_mixin: _DeviceDtypeModuleMixin
distributed: DistributedSamplerWrapper is_shared_filesystem _distributed_is_initialized; enums: LightningEnum
exceptions: MisconfigurationException
imports: package_available RequirementCache _IS_WINDOWS _NUMPY_AVAILABLE _TORCH_GREATER_EQUAL_2_2
    _TORCH_GREATER_EQUAL_2_3 _TORCH_GREATER_EQUAL_2_4 _TORCH_GREATER_EQUAL_2_5 _TORCH_GREATER_EQUAL_2_6
logger: _add_prefix _convert_params _flatten_dict _sanitize_params; optimizer: _optimizer_to_device
rank_zero: LightningDeprecationWarning rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info
    rank_zero_module rank_zero_only rank_zero_warn WarningCache _get_rank
seed: max_seed_value min_seed_value pl_worker_init_function reset_seed seed_everything
spike: SpikeDetection TrainingSpikeException
throughput: get_available_flops measure_flops Throughput ThroughputMonitor
types: LRScheduler Optimizable ProcessGroup ReduceLROnPlateau ReduceOp Steppable _DEVICE _MAP_LOCATION_TYPE
    _PARAMETERS _PATH _Stateful
warnings: disable_possible_user_warnings PossibleUserWarning
[pytorch] Callback LightningDataModule LightningModule seed_everything Trainer __version__ _logger
cli: ArgsType instantiate_class instantiate_module LightningArgumentParser LightningCLI LRSchedulerCallable
    LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion ModuleType Namespace OptimizerCallable ReduceLROnPlateau
    SaveConfigCallback
[pytorch.accelerators] Accelerator AcceleratorRegistry CPUAccelerator CUDAAccelerator find_usable_cuda_devices
    MPSAccelerator XLAAccelerator
accelerator: Accelerator; cpu: CPUAccelerator get_cpu_stats; cuda: CUDAAccelerator; mps: MPSAccelerator
xla: XLAAccelerator
[pytorch.callbacks] BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint
    DeviceStatsMonitor EarlyStopping EMAWeightAveraging GradientAccumulationScheduler LambdaCallback
    LearningRateFinder LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar
    RichModelSummary RichProgressBar SpikeDetection StochasticWeightAveraging ThroughputMonitor Timer TQDMProgressBar
    WeightAveraging
base: Callback; batch_size_finder: BatchSizeFinder; callback: Callback; checkpoint: Checkpoint
device_stats_monitor: DeviceStatsMonitor; early_stopping: EarlyStopping EarlyStoppingReason
finetuning: BackboneFinetuning BaseFinetuning multiplicative
gradient_accumulation_scheduler: GradientAccumulationScheduler; lambda_function: LambdaCallback
lr_finder: LearningRateFinder; lr_monitor: LearningRateMonitor; model_checkpoint: ModelCheckpoint
model_summary: ModelSummary; on_exception_checkpoint: OnExceptionCheckpoint
prediction_writer: BasePredictionWriter WriteInterval; pruning: ModelPruning; rich_model_summary: RichModelSummary
spike: SpikeDetection; stochastic_weight_avg: StochasticWeightAveraging; throughput_monitor: ThroughputMonitor
timer: Interval Timer; weight_averaging: EMAWeightAveraging WeightAveraging
[pytorch.callbacks.progress] ProgressBar RichProgressBar TQDMProgressBar
base: get_standard_metrics ProgressBar ProgressBarBase; progress_bar: get_standard_metrics ProgressBar
rich_progress: RichProgressBar RichProgressBarTheme; tqdm_progress: convert_inf Tqdm TQDMProgressBar
[pytorch.core] LightningDataModule LightningModule
datamodule: DataHooks LightningDataModule; hooks: CheckpointHooks DataHooks ModelHooks; lightning: LightningModule
module: LightningModule; optimizer: do_nothing_closure LightningOptimizer
saving: convert get_filesystem load_hparams_from_tags_csv load_hparams_from_yaml pl_load save_hparams_to_tags_csv
    save_hparams_to_yaml update_hparams
[pytorch.core.mixins] HyperparametersMixin
hparams_mixin: HyperparametersMixin
[pytorch.demos] BoringDataModule BoringModel DemoModel LightningLSTM LightningTransformer SequenceSampler SimpleLSTM
    Transformer WikiText2
boring_classes: BoringDataModule BoringDataModuleNoLen BoringModel DemoModel IterableBoringDataModule
    ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen
lstm: LightningLSTM SequenceSampler SimpleLSTM
transformer: Dictionary LightningTransformer PositionalEncoding tokenize Transformer WikiText2
[pytorch.loggers] CometLogger CSVLogger LitLogger Logger MLFlowLogger NeptuneLogger TensorBoardLogger WandbLogger
base: DummyExperiment DummyLogger Logger rank_zero_experiment; comet: CometLogger
csv_logs: CSVLogger ExperimentWriter; litlogger: LitLogger
logger: DummyExperiment DummyLogger Logger merge_dicts rank_zero_experiment; mlflow: MLFlowLogger
neptune: NeptuneLogger; tensorboard: TensorBoardLogger; wandb: WandbLogger
[pytorch.loops] _EvaluationLoop _FitLoop _PredictionLoop _TrainingEpochLoop
evaluation_loop: _EvaluationLoop; fit_loop: _FitLoop; prediction_loop: _PredictionLoop
training_epoch_loop: _TrainingEpochLoop
[pytorch.overrides]
distributed: UnrepeatedDistributedSampler
[pytorch.plugins] AsyncCheckpointIO BitsandbytesPrecision CheckpointIO ClusterEnvironment DeepSpeedPrecision
    DoublePrecision FSDPPrecision HalfPrecision LayerSync MixedPrecision Precision TorchCheckpointIO
    TorchSyncBatchNorm TransformerEnginePrecision XLACheckpointIO XLAPrecision _PLUGIN_INPUT
environments: ClusterEnvironment KubeflowEnvironment LightningEnvironment LSFEnvironment MPIEnvironment
    SLURMEnvironment TorchElasticEnvironment XLAEnvironment
layer_sync: LayerSync TorchSyncBatchNorm
[pytorch.plugins.io] AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO
async_plugin: AsyncCheckpointIO; checkpoint_plugin: CheckpointIO; torch_plugin: TorchCheckpointIO
xla_plugin: XLACheckpointIO
[pytorch.plugins.precision] BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision
    MixedPrecision Precision TransformerEnginePrecision XLAPrecision
amp: MixedPrecision; bitsandbytes: BitsandbytesPrecision; deepspeed: DeepSpeedPrecision; double: DoublePrecision
fsdp: FSDPPrecision; half: HalfPrecision; precision: Precision; transformer_engine: TransformerEnginePrecision
xla: XLAPrecision
[pytorch.profilers] AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler
advanced: AdvancedProfiler; base: PassThroughProfiler Profiler; profiler: Profiler
pytorch: PyTorchProfiler RegisterRecordFunction; simple: SimpleProfiler; xla: XLAProfiler
[pytorch.strategies] DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy
    SingleDeviceStrategy SingleDeviceXLAStrategy Strategy StrategyRegistry XLAStrategy
ddp: DDPStrategy; deepspeed: DeepSpeedStrategy; fsdp: FSDPStrategy; launchers:; model_parallel: ModelParallelStrategy
parallel: ParallelStrategy; single_device: SingleDeviceStrategy; single_xla: SingleDeviceXLAStrategy
strategy: Strategy; xla: XLAStrategy
[pytorch.trainer] seed_everything Trainer
states: RunningStage TrainerFn TrainerState TrainerStatus; trainer: Trainer
[pytorch.trainer.connectors]
accelerator_connector: _LITERAL_WARN _PRECISION_INPUT _PRECISION_INPUT_INT _PRECISION_INPUT_STR
    _PRECISION_INPUT_STR_ALIAS _PRECISION_INPUT_STR_ALIAS_CONVERSION
[pytorch.tuner] Tuner
lr_finder: _LRFinder; tuning: Tuner
[pytorch.utilities] AttributeDict CombinedLoader disable_possible_user_warnings find_shared_parameters FLOAT16_EPSILON
    FLOAT32_EPSILON FLOAT64_EPSILON grad_norm GradClipAlgorithmType is_picklable is_shared_filesystem LightningEnum
    measure_flops move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn
    set_shared_parameters suggested_max_num_workers
apply_func: apply_to_collection move_data_to_device; cloud_io: get_filesystem load load_ _load
combined_loader: CombinedLoader
data: AttributeDict extract_batch_size has_iterable_dataset has_len has_len_all_ranks sized_len
    suggested_max_num_workers
distributed: is_shared_filesystem rank_zero_debug rank_zero_info rank_zero_only rank_zero_warn
enums: GradClipAlgorithmType LightningEnum; exceptions: MisconfigurationException SIGTERMException _TunerExitException
grads: grad_norm
imports: module_available package_available RequirementCache _OMEGACONF_AVAILABLE _PYTHON_GREATER_EQUAL_3_11_0
    _RICH_AVAILABLE _TORCH_GREATER_EQUAL_2_6 _TORCH_GREATER_EQUAL_2_8 _TORCHMETRICS_GREATER_EQUAL_1_0_0
    _TORCHVISION_AVAILABLE
memory: garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory
    recursive_detach
model_helpers: get_torchvision_model is_overridden; parameter_tying: find_shared_parameters set_shared_parameters
parsing: AttributeDict clean_namespace collect_init_args get_init_args is_picklable lightning_getattr
    lightning_hasattr lightning_setattr save_hyperparameters
rank_zero: LightningDeprecationWarning rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info
    rank_zero_module rank_zero_only rank_zero_warn WarningCache _get_rank
seed: isolate_rng pl_worker_init_function reset_seed seed_everything; signature_utils: is_param_in_hook_signature
types: DistributedDataParallel EVAL_DATALOADERS LRSchedulerConfig LRSchedulerConfigType LRSchedulerPLType
    LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerConfig OptimizerLRScheduler
    OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS _EVALUATE_OUTPUT _METRIC _NUMBER _PREDICT_OUTPUT
    _SizedIterable
upgrade_checkpoint:
warnings: LightningDeprecationWarning PossibleUserWarning rank_zero_deprecation rank_zero_warn WarningCache
[pytorch.utilities.model_summary] DeepSpeedSummary get_formatted_model_size get_human_readable_count LayerSummary
    ModelSummary parse_batch_shape summarize
model_summary: get_formatted_model_size get_human_readable_count LayerSummary ModelSummary parse_batch_shape summarize
model_summary_deepspeed: DeepSpeedSummary
"""


def _joined(text: str) -> list[str]:
    return text.strip().replace("\n    ", " ").split("\n")


def _read_homes() -> dict[str, dict[str, tuple[str, str]]]:
    """Return section -> name of Lightning -> (module of hasten, name there)."""
    section = ""
    homes: dict[str, dict[str, tuple[str, str]]] = {section: {}}
    for line in _joined(_HOMES):
        if line.startswith("["):
            section = line.strip("[]")
            homes[section] = {}
            continue
        home, _, names = line.partition(": ")
        for word in names.split():
            name, _, there = word.partition("=")
            homes[section][name] = (home, there or name)
    return homes


def read_table() -> dict[str, dict[str, tuple[str, str]]]:
    """Return module of Lightning, without its root -> its names -> (module of hasten, name there)."""
    homes = _read_homes()
    table: dict[str, dict[str, tuple[str, str]]] = {}

    def add(module: str, names: str) -> None:
        sections = [home for section, home in homes.items() if f"{module}.".startswith(section)]
        table[module] = {
            name: next(h[name] for h in reversed(sections) if name in h) for name in names.split()
        }

    for line in _joined(_MODULES):
        if line.startswith("["):
            package, _, names = line[1:].partition("]")
            add(package, names)
            continue
        for entry in line.split(";"):
            module, _, names = entry.partition(":")
            add(f"{package}.{module.strip()}" if package else module.strip(), names)
    return table
