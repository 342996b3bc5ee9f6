"""DeepSpeed: an engine of its own computes backward, clips, steps and divides what training needs (ZeRO)."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import check
from hasten._lib.device import is_host
from hasten._lib.errors import MisconfigurationException, MissingPackage, make_error
from hasten._lib.observers import set_during, set_until
from hasten._lib.optional import install_line, installed
from hasten._lib.rank_zero import rank_zero_info
from hasten.checkpoint.contents import describe_misfit, load_weights
from hasten.elsewhere.conventions import class_of
from hasten.extend.origin import comes_from, is_builtin
from hasten.hooks import nothing
from hasten.machine.host import LockWatch
from hasten.optim import LRSchedulerConfig
from hasten.optim.backward import InBackward
from hasten.precision.base import Precision, to_floating
from hasten.precision.builtin import is_half, is_mixed
from hasten.strategies.base import StepEngine
from hasten.strategies.parallel import ParallelStrategy
from hasten.strategies.sharded import DividedSharding, DividedState
from hasten_deepspeed.config import (
    OF_CONFIG,
    EngineSettings,
    config_of,
    forces_cpu_adam,
    line_that_keeps_optimizer,
    offload_of,
    read_config,
    stage_of,
)
from hasten_deepspeed.offload import as_cpu_adam, check_offloaded, check_resumed, is_cpu_adam
from hasten_deepspeed.precision import DeepSpeedPrecision
from hasten_deepspeed.state import (
    EngineState,
    groups_of,
    is_divided,
    own_elements,
    parameters_by_name,
    read,
    set_parameter,
    shape_of,
)
from hasten_deepspeed.summary import DeepSpeedSummary

if TYPE_CHECKING:
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.report.summary import LayerTable

# Optimizers that compute with whole parameters or their dimensions: the engine steps flat buffers.
_NEEDS_WHOLE = ("Adafactor", "LBFGS", "Muon", "MuonAdamW", "SparseAdam")
T = TypeVar("T")

_trains = attrgetter("requires_grad")


class DeepSpeedStrategy(ParallelStrategy):
    """DeepSpeed's ZeRO: optimizer states, gradients and parameters are divided over the processes.

    Stage 1 divides the optimizer's state, stage 2 gradients too, stage 3 also the parameters. DeepSpeed's engine
    computes backward, accumulates, clips, scales and steps. Checkpoints are folders to which each process writes its
    part, in hasten's format: any number of processes and any strategy reads them, without running code. See
    docs/deepspeed.md. Names for the stages are "deepspeed_stage_1", "deepspeed_stage_2_offload", and so on.

    Args:
        accelerator: in place of ``Trainer(accelerator=...)``.
        zero_optimization: True; without ZeRO use ``strategy="ddp"``.
        stage: 1, 2 or 3.
        remote_device: stage 3: where parameters are made: None for the device, "cpu" or "nvme".
        offload_optimizer: keep the optimizer's state on the host, and step there.
        offload_parameters: stage 3: keep parameters on the host.
        offload_params_device: "cpu" or "nvme".
        nvme_path: a folder on an NVMe disk.
        params_buffer_count: buffers for parameters on NVMe.
        params_buffer_size: elements of each of them.
        max_in_cpu: elements of parameters to keep on the host with NVMe.
        offload_optimizer_device: "cpu" or "nvme".
        optimizer_buffer_count: buffers for optimizer states on NVMe.
        block_size: of a transfer from and to NVMe, in bytes.
        queue_depth: transfers that may be queued.
        single_submit: submit transfers one by one.
        overlap_events: submit and complete transfers at the same time.
        thread_count: threads of a transfer.
        pin_memory: pin the host memory of what is offloaded.
        sub_group_size: stage 3: elements that are stepped at once.
        contiguous_gradients: copy gradients into one buffer as they are computed.
        overlap_comm: stages 2 and 3: reduce gradients while backward computes.
        allgather_partitions: gather stepped parameters in one operation per bucket.
        reduce_scatter: reduce gradients to the process that steps them, not to all.
        allgather_bucket_size: elements that are gathered at once.
        reduce_bucket_size: elements that are reduced at once.
        zero_allow_untested_optimizer: train with optimizers that DeepSpeed's authors have not tested.
        logging_batch_size_per_gpu: samples of a batch, from which the engine computes its throughput; "auto" or None
            for the batch size of the train dataloader.
        config: DeepSpeed's configuration, a dict or the path of a JSON file, in place of the other arguments that
            configure it. Without it, the variable ``PL_DEEPSPEED_CONFIG_PATH`` can name a file.
        logging_level: of DeepSpeed's messages.
        parallel_devices: in place of ``Trainer(devices=...)``.
        cluster_environment: in place of ``Trainer(plugins=...)``.
        loss_scale: "16-...": a fixed scale of the loss; 0 for one that adapts.
        initial_scale_power: the adapting scale begins at 2 to this power.
        loss_scale_window: steps after which the scale is raised.
        hysteresis: overflows after which it is lowered.
        min_loss_scale: the smallest scale.
        partition_activations: divide activations of ``deepspeed.checkpointing`` over model-parallel processes.
        cpu_checkpointing: keep these activations on the host.
        contiguous_memory_optimization: copy them into one buffer.
        synchronize_checkpoint_boundary: wait for the device after each part that is recomputed.
        load_full_weights: for programs written for Lightning: whole files and folders are both recognized.
        precision_plugin: in place of ``Trainer(precision=...)``.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: how long a collective waits for the other processes.
        exclude_frozen_parameters: leave parameters without ``requires_grad`` out of checkpoints.
        precision: the same.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        TypeError: an argument has a wrong type.
        ValueError: an argument has a value that cannot be trained with, or contradicts ``config``.

    Example::

        >>> trainer = L.Trainer(strategy=DeepSpeedStrategy(stage=3), devices=8)  # doctest: +SKIP
        >>> DeepSpeedStrategy.name
        'deepspeed'

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020;
    `DeepSpeed, configuration <https://www.deepspeed.ai/docs/config-json/>`_.

    """

    name = "deepspeed"

    sharding: ZeroSharding
    engine: ZeroEngine

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1048576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: str | int | None = "auto",
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        logging_level: int = logging.WARNING,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
        exclude_frozen_parameters: bool = False,
        precision: Precision | None = None,
    ) -> None:
        given = dict(locals())
        if not installed("deepspeed"):
            what = "DeepSpeedStrategy needs the package deepspeed, which is not installed."
            raise MissingPackage(what, fix=f"Run: {install_line('deepspeed')}", name="deepspeed")
        super().__init__(
            accelerator, parallel_devices, cluster_environment, None,
            precision_plugin if precision is None else precision,
            process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        for argument in ("load_full_weights", "exclude_frozen_parameters"):
            check.boolean("DeepSpeedStrategy", argument, given[argument])
        own = read_config(config)
        if own is None:
            own = config_of(given)
        elif changed := [name for name in given if name in OF_CONFIG and given[name] != _default_arguments()[name]]:
            raise make_error(
                ValueError,
                f"DeepSpeedStrategy(config=..., {changed[0]}={given[changed[0]]!r}): the configuration says "
                f"everything that {changed[0]} could.",
                fix="Write it there, or leave config out.",
                argument="config",
            )
        self.config: dict[str, Any] = own
        self.stage: int = stage_of(own)
        self.remote_device = remote_device
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self._logging_level = logging_level
        self._batch_size = logging_batch_size_per_gpu
        self._settings = EngineSettings(own)
        self._precision: Precision = Precision()
        self._owner = "Trainer"
        # Gives the environment back what was changed for DeepSpeed.
        self._undo: ExitStack | None = None
        # The engine of the optimizer, or of the module that is evaluated; then the engines of other evaluated modules.
        self._engine: Any = None
        self._engines: list[Any] = []
        self._state: EngineState | None = None
        # Weights of a checkpoint, for the 32 bits of an engine that is made later.
        self._later: tuple[Mapping[str, Any], bool | None, str] | None = None
        self._flags: list[bool] = []
        self._parameters: list[nn.Parameter] = []
        self._watch: LockWatch | None = None
        self._said_replaced = False

    # -- facts

    @property
    def deepspeed_engine(self) -> Any:
        """DeepSpeed's engine.

        Raises:
            RuntimeError: there is none: nothing is being trained.

        """
        if self._engine is None:
            raise RuntimeError("DeepSpeedStrategy.deepspeed_engine: only while a module is trained or set up.")
        return self._engine

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are divided."""
        return self.stage == 3

    def _make_parts(self) -> tuple[ZeroSharding, ZeroEngine, ZeroState]:
        return ZeroSharding(self), ZeroEngine(self), ZeroState(self)

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        on_disk = [part for part in ("offload_optimizer", "offload_param") if offload_of(self.config, part) == "nvme"]
        on_disk += ["remote_device"] if self.remote_device == "nvme" else []
        if on_disk and is_host(devices[0]):
            raise make_error(
                ValueError,
                f"DeepSpeedStrategy with {on_disk[0]!r} on 'nvme' and accelerator='cpu': DeepSpeed's transfers to "
                "NVMe wait for ever without a GPU.",
                fix="Use strategy='deepspeed_stage_3_offload'.",
            )

    def precision_of(self, name: str, device: str) -> Precision | None:
        return DeepSpeedPrecision(name) if is_half(name) or is_mixed(name) else None

    def set_precision(self, precision: Precision) -> None:
        if class_of(precision) not in (Precision, DeepSpeedPrecision):
            raise make_error(
                ValueError,
                f"precision={precision.precision!r}, strategy='deepspeed': the engine computes in 32 or 16 bits, with "
                "numbers of its own.",
                fix=f"Use '32-true', 'bf16-mixed' or '16-mixed', not {type(precision).__name__}.",
                argument="precision",
            )
        self._precision = precision
        self._settings = EngineSettings(self.config)
        self._settings.set_precision(precision.precision)
        super().set_precision(precision)

    # -- once

    def launch(
        self, function: Callable[..., T], *args: object, owner: KeepsResults | None = None, **kwargs: object
    ) -> T:
        # DeepSpeed reads it when it is imported, in this process and in those that it starts.
        if is_host(self.root_device):
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return super().launch(function, *args, owner=owner, **kwargs)

    def _deepspeed(self) -> Any:
        """Return the package, ready for this process."""
        logging.getLogger("DeepSpeed").setLevel(self._logging_level)
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.utils.logger.setLevel(self._logging_level)
        kind, wanted = get_accelerator().device_name(), self.root_device.type
        if kind != wanted:
            what = f"DeepSpeed computes on {kind!r}, and this run on {wanted!r}."
            fix = f"Start the program with DS_ACCELERATOR={wanted}: DeepSpeed reads it when it is first imported."
            raise make_error(RuntimeError, what, fix=fix)
        if self._undo is None:
            # Read in forwards of stage 3, too.
            self._undo = ExitStack()
            set_until(self._undo, os.environ, "LOCAL_RANK", str(self.local_rank))
        if not deepspeed.comm.is_initialized():
            with self._environment():
                deepspeed.init_distributed(
                    dist_backend=self.process_group_backend, auto_mpi_discovery=False, dist_init_required=False
                )
        return deepspeed

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Set the variables from which DeepSpeed reads which process this is."""
        mine = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, "LOCAL_SIZE": self.num_processes}
        with ExitStack() as undo:
            for name, value in mine.items():
                set_until(undo, os.environ, name, str(value))
            yield

    def _dividing(self) -> AbstractContextManager[Any]:
        deepspeed = self._deepspeed()
        self._settings.take_batch_size(None, self.world_size)
        config = dict(self._settings.config)
        config.pop("optimizer", None)
        config.pop("scheduler", None)
        with self._environment():
            context: AbstractContextManager[Any] = deepspeed.zero.Init(
                remote_device=self.remote_device,
                pin_memory=self.remote_device == "cpu" and not is_host(self.root_device),
                # The type follows from it: dtype= is not float32 on machines without 16-bit floats.
                config_dict_or_path=config,
            )
        return context

    @property
    def _dtype(self) -> torch.dtype:
        return self._precision.dtype if isinstance(self._precision, DeepSpeedPrecision) else torch.float32

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Check the module; the engine divides it when its optimizer is known."""
        super().shard(module, stored)
        if self._engine is None:
            # Of an earlier run, whose state could be saved until now.
            self._state, self.engine.holds_gradients = None, False
        self._watch_locks()
        meta = next((name for name, tensor in module.named_parameters() if tensor.is_meta), None)
        if meta is not None:
            raise make_error(
                ValueError,
                f"strategy={self.name!r}: the parameter {meta!r} is on the meta device.",
                fix=(
                    "Make the module in configure_model(), or within init_module(): stage 3 divides each parameter "
                    "when it is made."
                ),
                argument="strategy",
            )

    def _watch_locks(self) -> None:
        if self._watch is None:
            self._watch = LockWatch()

    def _unwatch_locks(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse another optimizer than the one that the engine steps."""
        engine = self._engine
        if engine is not None and getattr(engine, "basic_optimizer", optimizer) is not optimizer:
            raise MisconfigurationException(
                f"strategy='deepspeed': the engine steps the {type(engine.basic_optimizer).__name__} that it was made "
                "with.",
                fix="Return one optimizer from configure_optimizers(), and keep it.",
                argument="strategy",
            )

    def _offloaded(self, optimizer: Any, schedulers: list[Any]) -> Optimizer:
        """Return DeepSpeed's optimizer for the host in place of torch's, and say so once."""
        self._deepspeed()
        in_16_bits = bool((self.config.get("bf16") or {}).get("bf16_optimizer_states"))
        own, said = as_cpu_adam(optimizer, [each.scheduler for each in schedulers], in_16_bits=in_16_bits)
        # The same methods as of the optimizer that the engine steps.
        optimizer.add_param_group, optimizer.zero_grad = _refuse_group, nothing
        if not self._said_replaced:
            rank_zero_info(said)
        self._said_replaced = True
        return own

    def _initialize(self, module: nn.Module, optimizer: Any, trained: list[nn.Parameter] | None) -> Any:
        deepspeed = self._deepspeed()
        self._watch_locks()
        size = self._batch_size if isinstance(self._batch_size, int) else None
        self._settings.take_batch_size(size, self.world_size)
        config = self._settings.config
        if trained is None:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        self._settings.check()
        with self._environment():
            engine, *_ = deepspeed.initialize(
                args=Namespace(
                    device_rank=self.local_rank if self.root_device.index is None else self.root_device.index
                ),
                model=module,
                optimizer=optimizer,
                model_parameters=trained,
                config=config,
                dist_init_required=False,
            )
        self._unwatch_locks()
        self._engines.append(engine)
        if self._engine is None:
            self._engine = self.model = engine
        return engine

    def _opened(self) -> None:
        """Record that ``loss.backward()`` has computed gradients."""
        self.engine.holds_gradients = True

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the engine; with stage 3 also for a module that is only evaluated, which it divides."""
        engine: Any = next((each for each in self._engines if each.module is module), None)
        if engine is None and self.stage == 3:
            engine = self._initialize(module, None, None)
        self._unwatch_locks()
        if engine is None:
            self.model, self._later = self.model or module, None
            return module
        made: nn.Module = engine
        return made

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the engine reduces gradients in its own way until the optimizer steps."""
        return nullcontext()

    # -- the end

    def on_exception(self, exception: BaseException) -> None:
        self._unwatch_locks()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._unwatch_locks()
        if self._state is not None:
            # ``save_checkpoint`` may follow.
            self._state.end()
        engines, self._engines, self._engine, self._later = self._engines, [], None, None
        for engine in engines:
            for name in ("add_param_group", "zero_grad"):
                vars(engine.basic_optimizer or engine).pop(name, None)
            engine.destroy()
        self._flags, self._parameters = [], []
        self.sharding.order, self.engine.factor = (), None
        self._settings = EngineSettings(self.config)
        self._settings.set_precision(self._precision.precision)
        if self._undo is not None:
            self._undo.close()
            self._undo = None
        super().teardown()


class ZeroSharding(DividedSharding):
    """The engine divides parameters in stage 3; in stages 1 and 2 only the 32-bit optimizer copy is sharded."""

    strategy: DeepSpeedStrategy

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any] | None:
        """Return the context in which modules are made; with stage 3 each parameter is divided when it is made."""
        if self.strategy.stage < 3 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        self.strategy._watch_locks()
        return self.strategy._dividing()

    def wrap_for_evaluation(self, module: nn.Module) -> nn.Module:
        """Return the engine: stage 3 divides a module that is only evaluated, too."""
        return self.strategy.wrap(module)

    def layer_table(self, module: nn.Module) -> type[LayerTable] | None:
        """Return the table with the parameters on each device, where they are divided."""
        return DeepSpeedSummary if any(map(is_divided, module.parameters())) else None

    def forward_order(self, module: nn.Module) -> tuple[str, ...]:
        """Return in which order the parts of a module begin (">name") and end ("<name") their forwards."""
        if self.strategy._engine is None or self.strategy.stage < 3:
            return ()
        return self.order or tuple(_assigned_order(module))

    def compute_along(self, module: nn.Module) -> None:
        """Take part in a step of an evaluation on other processes, without a batch: gather the same parameters."""
        order = self.forward_order(module)
        if not order:
            return
        from deepspeed.runtime.zero import parameter_offload

        optimizer = self.strategy._engine.optimizer
        hooks = getattr(optimizer, "parameter_offload", optimizer)
        parts = dict(module.named_modules())
        for event in order:
            part = parts[event[1:]]
            if event == ">":
                # A step that calls the module itself begins its forward twice.
                hooks.get_param_coordinator().reset_step()
            if event[0] == ">":
                hooks.pre_sub_module_forward_function(part)
            else:
                parameter_offload.FWD_MODULE_STACK.pop()
                hooks.post_sub_module_forward_function(part)


class ZeroEngine(StepEngine):
    """DeepSpeed's engine computes backward, accumulates, reduces gradients, clips and steps."""

    strategy: DeepSpeedStrategy
    owns_step = True
    computes_alone = False
    steps_in_backward = False

    def __init__(self, strategy: DeepSpeedStrategy) -> None:
        super().__init__(strategy)
        # By what the gradients of the next step are multiplied, a tensor where that is known on the device alone; None
        # for 1.
        self.factor: Any = None

    def set_precision(self, precision: Precision) -> None:
        super().set_precision(precision)
        self.backward = self._backward

    @property
    def needs_loss(self) -> bool:
        """Whether the engine waits for the backward of each batch: always."""
        return True

    # -- before the first step

    def prepare(self, *, owner: str, accumulation: int | None, clip_norm: float | None) -> None:
        """Put the settings of ``owner`` for accumulation and clipping into the configuration."""
        self.strategy._owner = owner
        if accumulation is not None:
            self.strategy._settings.take_accumulation(accumulation, owner)
        if clip_norm is not None:
            self.strategy._settings.take_clipping(clip_norm, owner)

    def check_compile(self, owner: str, *, trains: bool) -> None:
        """Refuse torch's compiler in training: the engine calls the module with hooks of its own."""
        if trains:
            raise MisconfigurationException(
                f"{owner}(compile=...) or a compiled module, and strategy={self.strategy.name!r}: leave it out."
            )

    def check_beside(self, conflicts: Callable[[], Iterable[tuple[object, str, str, str]]]) -> None:
        """Refuse what loops do between backward and step elsewhere."""
        for holds, what, why, fix in conflicts():
            if holds:
                raise MisconfigurationException(f"{what} and strategy={self.strategy.name!r}:{why}", fix=fix)

    def require_parameters(self, optimizer: Optimizer) -> None:
        """Accept an optimizer without parameters: the engine has taken them."""

    def may_keep_gradients(self, optimizers: Iterable[Optimizer], *, cleared_by_user: bool) -> bool:
        """Return False: the engine has its gradients in memory of its own, and clears them in its step."""
        return False

    def make(self, module: nn.Module, optimizers: list[Any], schedulers: list[Any]) -> tuple[list[Any], Any]:
        """Make the engine of a module and its optimizer; return its optimizers and schedulers."""
        if len(optimizers) > 1:
            what = f"strategy='deepspeed': the engine has one optimizer, and there are {len(optimizers)}."
            fix = "Put the parameters into groups of one optimizer, or use strategy='ddp' or 'fsdp'."
            raise MisconfigurationException(what, fix=fix, argument="strategy")
        if self.strategy._engine is not None:
            what = "strategy='deepspeed': there is an engine already. DeepSpeed trains one module with one optimizer;"
            fix = "put modules that train together into one nn.Module."
            raise MisconfigurationException(what, fix=fix, argument="strategy")
        for what, here in (("optimizer", optimizers), ("scheduler", schedulers)):
            if here and what in self.strategy.config:
                kind = type(here[0].scheduler if what == "scheduler" else here[0]).__name__
                raise MisconfigurationException(
                    f"configure_optimizers() returns {kind}, and DeepSpeedStrategy(config={{{what!r}: ...}}) has "
                    f"another {what}.",
                    fix="Leave one out.",
                )
        if not optimizers and "optimizer" not in self.strategy.config:
            return optimizers, schedulers
        optimizer = optimizers[0] if optimizers else None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [trained] if optimizer is None else groups_of(optimizer)
        if optimizer is not None and forces_cpu_adam(self.strategy.config) and not is_cpu_adam(optimizer):
            optimizer = self.strategy._offloaded(optimizer, schedulers)
        engine = self.strategy._initialize(module, optimizer, trained)
        self.strategy._state = EngineState(engine, groups)
        engine.optimizer.register_grad_acc_post_hook(self.strategy._opened)
        self.strategy._parameters = list(module.parameters())
        self.strategy._flags = list(map(_trains, self.strategy._parameters))
        basic = engine.basic_optimizer
        basic.add_param_group = _refuse_group
        # The engine clears gradients; the optimizer has buffers that must stay.
        basic.zero_grad = nothing
        scheduler = engine.lr_scheduler
        if scheduler is not None and self.strategy._owner == "Trainer":
            # Stepped by the loop like every other one.
            engine.lr_scheduler = None
            schedulers = [LRSchedulerConfig(scheduler, interval="step")]
        if self.strategy._later is not None:
            (state, strict, source), self.strategy._later = self.strategy._later, None
            self.strategy.state.load_state_dict(module, state, strict=strict, source=source)
        return [basic], schedulers

    def see_loaders(self, loaders: Sequence[Any]) -> None:
        """Set the engine's number of samples per batch and process; raise ValueError if the configuration differs."""
        strategy = self.strategy
        if len(loaders) != 1 or isinstance(strategy._batch_size, int):
            return
        size = strategy._settings.take_batch_size(_batch_size(loaders[0]), strategy.world_size)
        if strategy._engine is not None:
            strategy._engine.set_train_micro_batch_size(size)

    def check_optimizer(self, optimizer: Optimizer, owner: str) -> None:
        """Refuse an optimizer that the engine cannot step."""
        kind = type(optimizer)
        if isinstance(optimizer, InBackward):
            inner = optimizer.optimizer_class.__name__
            what = f"in_backward({inner}) and strategy='deepspeed': the engine steps when all gradients are there."
            raise make_error(ValueError, what, fix=f"Use torch.optim.{inner} as it is; stage 2 frees gradients early.")
        for base in kind.__mro__:
            if base.__name__ in _NEEDS_WHOLE and (is_builtin(base) or comes_from(base, "torch.optim")):
                raise make_error(
                    ValueError,
                    f"{base.__name__} and strategy='deepspeed': it computes with whole parameters, and the engine "
                    "steps parts of them.",
                    fix=f"Use torch.optim.AdamW, or {owner}(strategy='ddp').",
                )
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise make_error(
                ValueError,
                f"{kind.__name__} and strategy='deepspeed': it averages weights, and the engine does not change "
                "between them and those of training.",
                fix=f"Use torch.optim.AdamW, or {owner}(strategy='ddp').",
            )
        if forces_cpu_adam(self.strategy.config):
            check_offloaded(optimizer, keep=line_that_keeps_optimizer(self.strategy.config))

    # -- forward

    def make_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` as the forward of the engine."""
        if not _is_engine(wrapped):
            return function
        engine: Any = wrapped
        module: nn.Module = engine.module
        dtype = torch.get_default_dtype() if self.strategy._dtype is not torch.float32 else None
        flags = self.strategy._flags if engine is self.strategy._engine else []
        if function is module:
            forward: Callable[..., Any] = engine
        else:
            forward = _as_forward(engine, module, function)

        def checked(*args: Any, **kwargs: Any) -> Any:
            if flags and list(map(_trains, self.strategy._parameters)) != flags:
                self._refuse_changed(module)
            output = forward(*args, **kwargs)
            return output if dtype is None else to_floating(output, dtype)

        return checked

    def _refuse_changed(self, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        changed = next(
            names.get(id(parameter), "?")
            for parameter, before in zip(self.strategy._parameters, self.strategy._flags, strict=True)
            if parameter.requires_grad != before
        )
        raise make_error(
            RuntimeError,
            f"strategy='deepspeed': requires_grad of {changed!r} has changed since training began, and the engine "
            "steps what trained then.",
            fix="Freeze parameters before fit, or use strategy='ddp' or 'fsdp'.",
            argument="strategy",
        )

    def make_evaluation_forward(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls a step of an evaluation; stage 3 gathers parameters in its forward."""
        engine = self.strategy._engine
        if engine is None or self.strategy.stage < 3:
            return function
        forward, recorded = self.make_forward(function, engine), False

        def recording(*args: Any, **kwargs: Any) -> Any:
            nonlocal recorded
            if recorded or self.strategy.world_size == 1:
                return forward(*args, **kwargs)
            recorded = True
            events: list[str] = []
            with _events(module, events):
                output = forward(*args, **kwargs)
            self.strategy.sharding.order = tuple(events)
            return output

        return recording

    # -- a step

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if args or kwargs.keys() - {"retain_graph", "model"}:
            what = "backward(loss, ...) with strategy='deepspeed': the engine takes only retain_graph."
            raise make_error(TypeError, what, fix="Leave the other arguments out.")
        engine, self.holds_gradients = self.strategy.deepspeed_engine, True
        # The loop divides losses by the number of batches of their accumulation.
        engine.backward(loss, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)

    def check_first_step(self, optimizer: Optimizer) -> None:
        """Do nothing: DeepSpeed keeps the gradients."""

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return ``step(closure=None)`` of the engine, which reduces gradients, clips them and steps."""

        self.strategy.prepare_optimizer(optimizer)

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if kwargs:
                what = f"optimizer.step({', '.join(kwargs)}=...) with strategy='deepspeed': the engine takes none."
                raise make_error(TypeError, what, fix="Leave the arguments out.")
            result = closure() if closure is not None else None
            engine = self.strategy.deepspeed_engine
            factor, self.factor, opened, self.holds_gradients = self.factor, None, self.holds_gradients, False
            if not opened:
                # Nothing to step with, as optimizers of torch see it.
                return result
            if factor is None:
                engine.step()
                return result
            # Divided out together with the scale of the loss, before the norm is clipped.
            zero = engine.optimizer
            known_zero = not isinstance(factor, Tensor) and not factor
            scale = float("inf") if known_zero else zero.loss_scale / factor
            with set_during(zero, external_loss_scale=scale, custom_loss_scaler=True):
                engine.step()
            return result

        return step

    def make_clip(self, algorithm: str) -> None:
        """Return None: the engine clips when it steps."""
        return

    def make_zero_grad(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that does nothing: the engine clears gradients when it has stepped."""
        return nothing

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply the gradients of the next step."""
        self.factor = factor if self.factor is None else self.factor * factor

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Make the next step multiply its gradients by 0."""
        self.scale_gradients(optimizer, 0.0)

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Refuse: the engine clips when it steps."""
        raise MisconfigurationException(
            "strategy='deepspeed': the engine clips gradients when it steps.",
            fix=(
                "Write Trainer(gradient_clip_val=...), or DeepSpeedStrategy(config={'gradient_clipping': ...}) with "
                "Fabric."
            ),
            argument="strategy",
        )


class ZeroState(DividedState):
    """Each process saves its part, in 32 bits, into a folder."""

    strategy: DeepSpeedStrategy
    saves_folders = True

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights: of what the optimizer steps this process's part, in 32 bits."""
        found: dict[str, Any] = {}
        for name, value in parameters_by_name(module).items():
            if not isinstance(value, nn.Parameter):
                found[name] = value.detach() if isinstance(value, Tensor) else value
            elif self.strategy.exclude_frozen_parameters and not value.requires_grad:
                continue
            elif self.strategy._state is not None and self.strategy._state.is_trained(value):
                found[name] = self.strategy._state.weight(value)
            else:
                found[name] = own_elements(value) if is_divided(value) else value.detach()
        return found

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> None:
        """Restore the weights of the user's module, and the 32 bits that the optimizer steps."""
        stored = getattr(state, "stored", None)
        entries: dict[str, Any] = dict(stored() if callable(stored) else state.items())
        present = parameters_by_name(module)
        if self.strategy.exclude_frozen_parameters:
            frozen = (key for key, each in present.items() if isinstance(each, nn.Parameter) and not each.requires_grad)
            left_out = {key for key in frozen if key not in entries}
            if left_out:
                entries |= {key: _Kept(present[key]) for key in left_out}
        if self.strategy._engine is None:
            # The engine takes the 32 bits of the checkpoint; the module's may be 16.
            self.strategy._later = state, strict, source
        divided = {key for key, value in present.items() if is_divided(value)}
        if self.strategy._state is None and not divided:
            load_weights(
                module, {key: read(_present(each)) for key, each in entries.items()}, strict=strict, source=source
            )
            return
        _check_fits(module, entries, present, strict, source)
        for key, value in present.items():
            if key not in entries or isinstance(entries[key], _Kept):
                continue
            if isinstance(value, nn.Parameter) and self.strategy._state is not None:
                self.strategy._state.set_weight(value, entries[key])
            elif isinstance(value, nn.Parameter):
                set_parameter(value, read(entries[key]))
            elif isinstance(value, Tensor):
                with torch.no_grad():
                    value.copy_(read(entries[key]))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer, of which this process has a part."""
        if self.strategy._state is None:
            return super().optimizer_state(optimizer)
        if self.strategy.engine.holds_gradients:
            raise make_error(
                RuntimeError,
                "A checkpoint with strategy='deepspeed': gradients have been computed that no step has used yet, and "
                "the engine keeps them.",
                fix="Save after a step, or save the weights alone (weights_only=True).",
            )
        return self.strategy._state.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore the state of the optimizer."""
        if self.strategy._state is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self.strategy._state.load_optimizer_state(optimizer, state)
            check_resumed(optimizer)


def _default_arguments() -> dict[str, Any]:
    parameters = inspect.signature(DeepSpeedStrategy.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


class _Kept:
    """A weight that a checkpoint leaves out, unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _present(value: Any) -> Any:
    return value.value.detach() if isinstance(value, _Kept) else value


def _batch_size(loader: Any) -> int | None:
    """Return the number of samples of a batch; None where the loader does not say."""
    size = getattr(loader, "batch_size", None)
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if size is None else size
    return size if isinstance(size, int) else None


def _is_engine(module: object) -> bool:
    """Return whether ``module`` is an engine of DeepSpeed's."""
    kind = sys.modules.get("deepspeed.runtime.engine")
    return kind is not None and isinstance(module, kind.DeepSpeedEngine)


def _as_forward(engine: Any, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` in place of the module's forward, inside of the engine's."""
    own, name = module.__dict__, "forward"

    def forward(*args: Any, **kwargs: Any) -> Any:
        replaced = own.get(name)

        def put_back() -> None:
            own.pop(name, None)
            if replaced is not None:
                own[name] = replaced

        def once(*args: Any, **kwargs: Any) -> Any:
            # The function calls forward itself.
            put_back()
            return function(*args, **kwargs)

        own[name] = once
        try:
            return engine(*args, **kwargs)
        finally:
            put_back()

    return forward


def _refuse_group(group: object) -> None:
    raise make_error(
        RuntimeError,
        "strategy='deepspeed': parameters cannot be added to an optimizer that trains: the engine steps what it was "
        "made with.",
        fix="Give configure_optimizers() all parameters, or use strategy='ddp'.",
        argument="strategy",
    )


def _check_fits(
    module: nn.Module, entries: Mapping[str, Any], present: Mapping[str, Any], strict: bool | None, source: str
) -> None:
    """Raise RuntimeError, as torch does, if names or shapes do not fit."""
    shapes = {
        key: torch.empty(shape_of(value), device="meta") if isinstance(value, nn.Parameter) else value
        for key, value in present.items()
    }
    found = {
        key: shapes[key] if isinstance(value, _Kept) else torch.empty(value.shape, device="meta")
        for key, value in entries.items()
        if hasattr(value, "shape") or isinstance(value, _Kept)
    }
    mis_shaped = any(key in shapes and getattr(shapes[key], "shape", None) != each.shape for key, each in found.items())
    other_names = (strict is None or strict) and entries.keys() != present.keys()
    if mis_shaped or other_names:
        raise RuntimeError(describe_misfit(type(module).__name__, {**entries, **found}, shapes, source))


@contextmanager
def _events(module: nn.Module, events: list[str]) -> Iterator[None]:
    """Append to ``events`` when the parts of a module begin and end their forwards."""
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hooks.enter_context(part.register_forward_pre_hook(lambda *_, name=name: events.append(f">{name}")))
            hooks.enter_context(part.register_forward_hook(lambda *_, name=name: events.append(f"<{name}")))
        yield


def _assigned_order(module: nn.Module, name: str = "") -> Iterator[str]:
    """Yield events as if parts compute in the order in which they were assigned."""
    yield f">{name}"
    for child_name, child in module.named_children():
        yield from _assigned_order(child, f"{name}.{child_name}" if name else child_name)
    yield f"<{name}"
