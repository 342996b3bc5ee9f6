"""Make a Runtime from what the user writes ("gpu", 8, "ddp", "bf16-mixed"): one function per argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hasten import elsewhere, strategies
from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, MisconfigurationRuntimeError, WrongType, make_error, parts_of
from hasten._lib.names import unknown_word
from hasten._lib.rank_zero import rank_zero_warn
from hasten.checkpoint.files import CheckpointIO
from hasten.elsewhere import conventions
from hasten.extend.entry_points import found, load
from hasten.extend.origin import is_builtin
from hasten.machine.cluster import (
    ClusterEnvironment,
    LightningEnvironment,
    ProcessGroupEnvironment,
    TorchElasticEnvironment,
    find_cluster,
    number_of_processes,
)
from hasten.machine.collectives import joined
from hasten.machine.devices import (
    ACCELERATORS,
    Accelerator,
    CPUAccelerator,
    added_accelerators,
    best_accelerator,
    whole_number,
)
from hasten.machine.host import is_interactive
from hasten.machine.launch import forget_other_rank
from hasten.precision.base import Precision
from hasten.precision.builtin import DoublePrecision, HalfPrecision, MixedPrecision, is_half, is_mixed
from hasten.runtime import Runtime
from hasten.strategies.base import Strategy
from hasten.strategies.parallel import LayerSync, ParallelStrategy, TorchSyncBatchNorm
from hasten.strategies.single import OneProcess

if TYPE_CHECKING:
    from hasten.types import AcceleratorLike, Devices, Plugin, PrecisionName, StrategyLike

T = TypeVar("T")

PRECISIONS = {
    "64-true": ("64-true", "64", "double"),
    "32-true": ("32-true", "32", "full"),
    "16-mixed": ("16-mixed", "16", "fp16", "half"),
    "bf16-mixed": ("bf16-mixed", "bf16"),
    "16-true": ("16-true",),
    "bf16-true": ("bf16-true",),
    "fp8": ("fp8",),
    "transformer-engine": ("transformer-engine",),
    "transformer-engine-float16": ("transformer-engine-float16",),
}

# Names that a program has registered (``utilities.enums``), with the functions that make the objects.
REGISTERED_STRATEGIES: dict[str, Callable[[], Strategy]] = {}
REGISTERED_ACCELERATORS: dict[str, Callable[[], Accelerator]] = {}

_SINGLE_DEVICE = "single_device"
# The arguments of DDPStrategy for the parts of a name that begins with "ddp".
_SHARDED: dict[str, dict[str, Any]] = {"": {}, "_sharded": {"shard_optimizer": True}}
_START_METHODS: dict[str, dict[str, Any]] = {
    "": {},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
}
_FIND_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
# Names of the core's strategies, with the class in ``hasten.strategies``, which is imported when it is used, and its
# arguments. Other packages add more, see docs/extend/package.md.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    _SINGLE_DEVICE: ("SingleDeviceStrategy", {}),
    **{
        f"ddp{sharded}{suffix}{ending}": ("DDPStrategy", {**method, **options, **shards})
        for sharded, shards in _SHARDED.items()
        for suffix, method in _START_METHODS.items()
        for ending, options in _FIND_UNUSED.items()
    },
    "fsdp": ("FSDPStrategy", {}),
    "fsdp2": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
}
# The strategies for one device and for several, if an accelerator has none of its own.
_USUAL = (_SINGLE_DEVICE, "ddp")


def runtime(
    *,
    accelerator: AcceleratorLike | None = "auto",
    strategy: StrategyLike | None = "auto",
    devices: Devices | None = "auto",
    num_nodes: int | str = 1,
    precision: PrecisionName | str | int | None = None,
    plugins: Plugin | Sequence[Plugin] | None = None,
    sync_batchnorm: bool = False,
    owner: str = "Trainer",
) -> Runtime:
    """Return the Runtime for the arguments of a Trainer or a Fabric, the ``owner`` in messages. Nothing is started.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument names something unavailable, or two contradict each other.

    Example::

        >>> runtime(accelerator="cpu", precision="bf16").precision.precision
        'bf16-mixed'

    """
    precision_plugin, checkpoint_io, cluster, layer_sync = _plugins(plugins, owner)
    layer_sync = _layer_sync(sync_batchnorm, layer_sync, owner)
    given = _parts_of(strategy) if isinstance(strategy, Strategy) else {}
    precision_plugin = _once(owner, "precision", precision_plugin, given)
    checkpoint_io = _once(owner, "checkpoint_io", checkpoint_io, given)
    cluster = _once(owner, "cluster", cluster, given)
    is_auto = isinstance(accelerator, str) and accelerator == "auto"
    accelerator = _once(owner, "accelerator", None if is_auto else accelerator, given)
    if whole_number(devices) == 0 or (isinstance(devices, (list, tuple)) and not devices):
        raise MisconfigurationException(
            f"{owner}(devices={devices!r}): a run needs a device.", fix="Use at least 1, or 'auto'.", argument="devices"
        )
    chosen = _accelerator(_accelerator_for(accelerator, strategy, given.get("devices", ()), owner), owner)
    num_nodes = _num_nodes(num_nodes, owner)
    forget_other_rank()
    cluster = _cluster(cluster, chosen)
    found, num_nodes = _devices(given.get("devices", devices), num_nodes, chosen, cluster, owner)
    if isinstance(strategy, str) and strategy.lower() == _SINGLE_DEVICE and devices in (None, "auto"):
        found = found[:1]
    strategy_in_use = _strategy(strategy, chosen, found, num_nodes, owner)
    # Checking a GPU would initialize CUDA, and this process could no longer be forked.
    is_forked = found[0].type == "cuda" and strategy_in_use.copies_this_process
    precision_in_use = _precision(
        precision, precision_plugin, chosen, found[0], owner, strategy_in_use, check=not is_forked
    )
    _prefix_owner(owner, strategy_in_use.set_precision, precision_in_use)
    if isinstance(strategy_in_use, ParallelStrategy):
        _prefix_owner(owner, cluster.validate_settings, len(found), num_nodes)
        strategy_in_use.layer_sync = layer_sync
    else:
        _warn_if_alone(cluster, devices, owner)
    strategy_in_use.attach(accelerator=chosen, devices=found, cluster=cluster, num_nodes=num_nodes)
    return Runtime(
        accelerator=chosen,
        strategy=strategy_in_use,
        precision=precision_in_use,
        cluster=cluster,
        checkpoint_io=checkpoint_io,
        device_ids=[device.index if device.index is not None else i for i, device in enumerate(found)],
    )


def _once(owner: str, name: str, value: Any, given: Mapping[str, Any]) -> Any:
    """Return the object passed to the Trainer, or else to the strategy."""
    if value is not None and name in given:
        where = "accelerator flag" if name == "accelerator" else "plugins"
        called = "cluster_environment" if name == "cluster" else name
        raise MisconfigurationException(
            f"{owner}(...): {called} set through both strategy class and {where}: {given[name]!r} and {value!r}.",
            fix="Leave one out.",
        )
    return given.get(name, value)


def _prefix_owner(owner: str, function: Callable[..., T], *args: object) -> T:
    """Return ``function(*args)``; put ``owner`` in front of the message of an error about an argument."""
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        kinds = {ValueError: MisconfigurationException, TypeError: WrongType}
        kind = kinds.get(type(error), type(error))
        if kind not in kinds.values():
            raise
        what, fix, argument = parts_of(error)
        first, colon, rest = f"{what} ".partition(": ")
        what = f"{owner}({first}): {rest}".rstrip() if colon else f"{owner}: {what}"
        raise make_error(kind, what, fix=fix, argument=argument) from None


def _plugins(
    plugins: Any, owner: str
) -> tuple[Precision | None, CheckpointIO | None, ClusterEnvironment | None, LayerSync | None]:
    plugins = check.as_list(plugins)
    given = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    found: dict[type, Any] = {Precision: None, CheckpointIO: None, ClusterEnvironment: None, LayerSync: None}
    for plugin in given:
        kind = next((kind for kind in found if isinstance(plugin, kind)), None)
        if kind is None:
            hint = f" Write {plugin.__name__}()." if isinstance(plugin, type) else ""
            raise WrongType(
                f"{owner}(plugins=[...]): {check.shown(plugin)} is not a plugin.",
                fix=(
                    "Use objects of the classes in hasten.plugins: a Precision, a CheckpointIO, a ClusterEnvironment "
                    f"or a LayerSync.{hint}"
                ),
                argument="plugins",
            )
        if found[kind] is not None:
            what = f"{owner}(plugins=[...]): there are two {kind.__name__} objects."
            raise MisconfigurationException(what, fix="Leave one out.", argument="plugins")
        found[kind] = plugin
    return found[Precision], found[CheckpointIO], found[ClusterEnvironment], found[LayerSync]


def _layer_sync(sync_batchnorm: bool, layer_sync: LayerSync | None, owner: str) -> LayerSync | None:
    if sync_batchnorm is not True:
        return layer_sync
    if not isinstance(layer_sync, TorchSyncBatchNorm | None):
        raise MisconfigurationException(
            f"{owner}(sync_batchnorm=True, plugins={layer_sync!r}): both say how layers are computed over all "
            "processes, which is not allowed.",
            fix="Leave one out.",
            argument="sync_batchnorm",
        )
    return layer_sync or TorchSyncBatchNorm()


def _cluster(given: ClusterEnvironment | None, accelerator: Accelerator) -> ClusterEnvironment:
    cluster = find_cluster() if given is None else given
    # No launcher has started the processes of this run.
    return (accelerator.default_cluster() if type(cluster) is LightningEnvironment else None) or cluster


def _parts_of(strategy: Strategy) -> dict[str, Any]:
    """Return what was given to a strategy, checked."""
    given = dict(strategy.given)
    for name, kind in (("checkpoint_io", CheckpointIO), ("cluster", ClusterEnvironment), ("precision", Precision)):
        if name in given:
            check.instance(type(strategy).__name__, name, given[name], kind, f"a {kind.__name__}")
    return given


# -- accelerators


def _accelerator_for(accelerator: Any, strategy: Any, devices: Sequence[torch.device], owner: str) -> Any:
    """Return the accelerator asked for: by its argument, by a strategy for such devices only, or by its ``devices``."""
    if accelerator is None and (kind := _kind_for_strategy(strategy)) is not None:
        accelerator = kind.name()
    if devices and accelerator is None:
        here = devices[0].type
        return next((kind.name() for kind in _kinds().values() if kind.device_type() == here), here)
    if devices and isinstance(accelerator, str) and (kind := _kinds().get(accelerator.lower())) is not None:
        # Checked before the device is looked for: the machine may not have one.
        _check_parallel_devices(devices, kind, owner)
    return accelerator


def _kind_for_strategy(strategy: Any) -> type[Accelerator] | None:
    """Return the only kind of device that a strategy supports; None if it supports several."""
    if isinstance(strategy, str):
        names = {strategy.lower()}
    elif isinstance(strategy, Strategy):
        # A subclass may have another name.
        names = {getattr(kind, "name", "") for kind in type(strategy).__mro__}
    else:
        return None
    if names & STRATEGIES.keys() or names <= {"", "auto"}:
        return None
    return next((kind for kind in added_accelerators().values() if names & set(kind.strategies)), None)


def _kinds() -> dict[str, type[Accelerator]]:
    return {**ACCELERATORS, **added_accelerators()}


def _accelerator(accelerator: Any, owner: str) -> Accelerator:
    if isinstance(accelerator, Accelerator):
        if not accelerator.is_available():
            raise MisconfigurationRuntimeError(
                f"{owner}(accelerator={type(accelerator).__name__}()): it can not run on your system, where "
                "is_available() is False.",
                fix=f"Use one of {_listed(_present_accelerators())}.",
                argument="accelerator",
            )
        return accelerator
    given = f"{owner}(accelerator={check.shown(accelerator)})"
    if accelerator is not None and not isinstance(accelerator, str):
        raise _wrong_accelerator(accelerator, owner)
    name = "auto" if accelerator is None else accelerator.lower()
    if name in REGISTERED_ACCELERATORS:
        return REGISTERED_ACCELERATORS[name]()
    if name == "auto":
        first = (kind() for kind in added_accelerators().values() if kind.comes_first())
        return next(first, None) or best_accelerator()
    if name == "gpu":
        name = "mps" if ACCELERATORS["mps"].is_available() else "cuda"
    kind = ACCELERATORS.get(name) or added_accelerators().get(name)
    if kind is None:
        what, fix = _why_no_accelerator(given, name)
        raise MisconfigurationException(what, fix=fix, argument="accelerator")
    kind.check_available(given)
    if not kind.is_available():
        raise MisconfigurationRuntimeError(
            f"{given}: this machine has no {name.upper()} device that torch {torch.__version__} can use.",
            fix=f"Use one of {_listed(_present_accelerators())}.",
            argument="accelerator",
        )
    return kind()


def _present_accelerators() -> list[str]:
    """Return the names for ``accelerator=`` that this machine has devices for."""
    present = [name for name, kind in _kinds().items() if kind.is_available() and kind.name() == name]
    return ["auto", *present, *(["gpu"] if {"cuda", "mps"} & set(present) else [])]


def _wrong_accelerator(accelerator: object, owner: str) -> Exception:
    """Return the error for something that is neither a name nor an Accelerator."""
    argument = "accelerator"
    if isinstance(accelerator, type) and issubclass(accelerator, Accelerator):
        name = accelerator.__name__
        return WrongType(f"{owner}(accelerator={name}): that is a class.", fix=f"Write {name}().", argument=argument)
    return check.wrong_type(
        owner, argument, accelerator, f"one of {_listed(_present_accelerators())}, or an Accelerator"
    )


def _why_no_accelerator(shown: str, name: str) -> tuple[str, str]:
    """Return why a name is not an accelerator, after the argument as it was ``shown``, and what to write."""
    if name in _strategy_names():
        return f"{shown}: that is a strategy.", f"Write strategy={name!r}."
    for names in (elsewhere.ACCELERATORS, elsewhere.STRATEGIES):
        if name in names:
            reason, write = names[name].parts()
            return f"{shown}: {reason}", write
    present = _present_accelerators()
    known = dict.fromkeys((*present, "gpu", *_kinds()))
    return _unknown(shown, name, known, f"use one of {_listed(present)}.", {"nvidia": "cuda", "rocm": "cuda"})


def _check_parallel_devices(devices: Sequence[torch.device], kind: type[Accelerator] | Accelerator, owner: str) -> None:
    """Refuse a strategy's own devices that do not belong to the accelerator."""
    if wrong := next((device for device in devices if device.type != kind.device_type()), None):
        raise MisconfigurationException(
            f"{owner}(accelerator={kind.name()!r}) and a strategy with parallel_devices=[{wrong}]: both choose the "
            "device.",
            fix="Leave one out.",
            argument="accelerator",
        )


# -- devices


def _num_nodes(num_nodes: Any, owner: str) -> int:
    if isinstance(num_nodes, str):
        num_nodes = whole_number(num_nodes) or num_nodes
    number: int = check.whole(owner, "num_nodes", num_nodes, at_least=1, allowed="the number of machines, at least 1")
    return number


def _devices(
    devices: Any, num_nodes: int, accelerator: Accelerator, cluster: ClusterEnvironment, owner: str
) -> tuple[list[torch.device], int]:
    """Return the devices of this machine, one for each process, and the number of machines."""
    devices = check.as_list(devices)
    if isinstance(devices, list) and devices and all(isinstance(device, torch.device) for device in devices):
        _check_parallel_devices(devices, accelerator, owner)
        return devices, num_nodes
    if devices is None or (isinstance(devices, str) and devices == "auto"):
        # The launcher has set the number of processes, also if an environment of Ray's is passed.
        started: ClusterEnvironment = ProcessGroupEnvironment() if ProcessGroupEnvironment.detect() else cluster
        if isinstance(started, (TorchElasticEnvironment, ProcessGroupEnvironment)):
            per_machine = started.local_world_size()
            if num_nodes == 1:
                num_nodes = max(1, number_of_processes(started) // per_machine)
            return accelerator.get_parallel_devices(per_machine), num_nodes
        return accelerator.get_parallel_devices(accelerator.auto_device_count()), num_nodes
    if isinstance(devices, (bool, float)):
        indices = "" if isinstance(accelerator, CPUAccelerator) else ", a list of indices, '0,1',"
        raise WrongType(f"{owner}(devices={devices!r}):", fix=f"use a number{indices} or 'auto'.", argument="devices")
    if type(accelerator) is CPUAccelerator and (count := _count_of_indices(devices)):
        # A program that chooses its device by one argument keeps the indices of its GPUs.
        rank_zero_warn(
            f"{owner}(devices={devices!r}, accelerator='cpu'): the CPU has no indices. Using devices={count}, the "
            "number of processes."
        )
        devices = count
    parsed = _prefix_owner(owner, accelerator.parse_devices, devices)
    found: list[torch.device] = _prefix_owner(owner, accelerator.get_parallel_devices, parsed)
    return found, num_nodes


def _count_of_indices(devices: Any) -> int:
    """Return how many different indices a list, or a string such as "0,1", has; 0 for anything else."""
    if isinstance(devices, str) and "," in devices:
        devices = [int(part) if part.strip().isdigit() else part for part in devices.split(",") if part.strip()]
    if not isinstance(devices, (list, tuple)):
        return 0
    is_index = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in devices)
    return len(set(devices)) if is_index and len(set(devices)) == len(devices) else 0


def _warn_if_alone(cluster: ClusterEnvironment, devices: Any, owner: str) -> None:
    """Warn that several processes have been started, each of which is a run of one process."""
    # After a run on all of them, a program may well evaluate on one device.
    if isinstance(cluster, TorchElasticEnvironment) and not joined() and (count := cluster.local_world_size()) > 1:
        rank_zero_warn(
            f"{owner}(devices={devices!r}): {count} processes were started, and each of them computes the whole run "
            "alone.",
            fix="Write devices='auto' and strategy='auto' to divide the work among them.",
        )


# -- strategies


def _strategy(
    strategy: Any, accelerator: Accelerator, devices: list[torch.device], num_nodes: int, owner: str
) -> Strategy:
    count = len(devices) * num_nodes
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif strategy is None or isinstance(strategy, str):
        chosen = _named_strategy(strategy, accelerator, count, len(devices), owner)
    elif isinstance(strategy, type) and issubclass(strategy, Strategy):
        what = f"{owner}(strategy={strategy.__name__}): that is a class."
        raise WrongType(what, fix=f"Write {strategy.__name__}().", argument="strategy")
    else:
        raise check.wrong_type(owner, "strategy", strategy, "a name such as 'ddp', or a Strategy object")
    given = f"{owner}(strategy={strategy!r}"
    _check_kind_of_device(chosen, accelerator, devices[0].type, given)
    if isinstance(chosen, OneProcess) and not chosen.takes_all_devices and count > 1:
        what = f"{given}, devices={len(devices)}, num_nodes={num_nodes}): one device cannot be {count}."
        raise MisconfigurationException(what, fix="Use devices=1, or strategy='auto'.", argument="strategy")
    return chosen


def _named_strategy(
    strategy: str | None, accelerator: Accelerator, count: int, on_this_machine: int, owner: str
) -> Strategy:
    """Return the strategy of a name; with "auto" the accelerator's strategy for ``count`` processes."""
    name = "auto" if strategy is None else strategy.lower()
    if name in REGISTERED_STRATEGIES:
        return REGISTERED_STRATEGIES[name]()
    if name != "auto":
        return _make_strategy(name, strategy, on_this_machine, owner)
    for_one, *others = accelerator.strategies or _USUAL
    if count == 1 or not others:
        return _make_strategy(for_one, strategy, on_this_machine, owner)
    options = {"start_method": "fork"} if is_interactive() else {}
    return _make_strategy(others[0], strategy, on_this_machine, owner, **options)


def _make_strategy(name: str, written: object, devices: int, owner: str, **options: Any) -> Strategy:
    """Return the strategy of a name, the core's or one that a package has added; ``written`` is for messages."""
    if name in STRATEGIES:
        kind, arguments = STRATEGIES[name]
        made = getattr(strategies, kind)(**{**arguments, **options})
    elif name in found("hasten.strategies"):
        make = load("hasten.strategies", name, purpose=f"{owner}(strategy={written!r})")
        made = make(**options) if callable(make) else make
    else:
        what, fix = _why_no_strategy(f"{owner}(strategy={written!r})", name, devices)
        raise MisconfigurationException(what, fix=fix, argument="strategy")
    if not isinstance(made, Strategy):
        place = found("hasten.strategies")[name].value
        raise WrongType(
            f"{owner}(strategy={name!r}): the entry point {place} gives {type(made).__name__}.",
            fix="Let it name a Strategy, or a class or function that makes one without arguments.",
            argument="strategy",
        )
    return made


def _check_kind_of_device(strategy: Strategy, accelerator: Accelerator, device: str, given: str) -> None:
    """Refuse a strategy that does not train on a kind of device; ``given`` begins the message."""
    kind, own = _kind_for_strategy(strategy), accelerator.strategies
    if own and is_builtin(type(strategy)) and (kind is None or kind.device_type() != device):
        name = accelerator.name()
        what = f"{given}, accelerator={name!r}):"
        fix = f"on {name.upper()}s use one of 'auto', {_listed(own)}."
        raise MisconfigurationException(what, fix=fix, argument="strategy")
    if kind is not None and kind.device_type() != device:
        name = kind.name()
        what = f"{given}, accelerator={device!r}): it trains on {name.upper()}s."
        raise MisconfigurationException(what, fix=f"Use accelerator={name!r}, or strategy='auto'.", argument="strategy")
    if isinstance(strategy, ParallelStrategy) and device == "mps":
        what = f"{given}, accelerator='mps'): MPS has one device and no communication between processes."
        raise MisconfigurationException(what, fix="Use strategy='auto', or accelerator='cpu'.", argument="strategy")


def _why_no_strategy(shown: str, name: str, devices: int) -> tuple[str, str]:
    """Return why a name is not a strategy, after the argument as it was ``shown``, and what to write."""
    if name in elsewhere.STRATEGIES:
        reason, write = elsewhere.STRATEGIES[name].parts(devices)
        return f"{shown}: {reason}", write
    if name in elsewhere.ACCELERATORS or name == "gpu" or name in _kinds():
        return f"{shown}: that is a kind of device.", f"Write accelerator={name!r}."
    allowed = _strategy_names()
    listed = _listed(one for one in allowed if "_find_unused" not in one)
    return unknown_word(
        shown,
        name,
        allowed,
        f"use one of {listed}, or a Strategy. Names with 'ddp' can end in '_find_unused_parameters_true'.",
    )


def _strategy_names() -> list[str]:
    return ["auto", *STRATEGIES, *found("hasten.strategies")]


def _call(make: Any) -> str:
    """Return the call that a program would write for a class, or for a ``partial`` of one."""
    if isinstance(make, partial):
        return _written(make.func.__name__, make.keywords)
    return _written(make.__name__, {})


def _written(kind: str, arguments: Mapping[str, Any]) -> str:
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def accepted_strategies() -> dict[str, str]:
    """Return the names that ``strategy=`` takes, and what each stands for, as a program would write it."""
    single, several = (_written(*STRATEGIES[name]) for name in _USUAL)
    return {
        "auto": f"{single} on one device, else {several}",
        **{name: _written(kind, arguments) for name, (kind, arguments) in STRATEGIES.items()},
        **{
            name: _call(load("hasten.strategies", name, purpose=f"strategy={name!r}"))
            for name in found("hasten.strategies")
        },
    }


def accepted_accelerators() -> dict[str, str]:
    """Return the names that ``accelerator=`` takes, and what each stands for."""
    return {
        "auto": "the fastest of these that the machine has",
        "gpu": "cuda or mps, whichever the machine has",
        **{name: f"{kind.__name__}()" for name, kind in _kinds().items()},
    }


# -- precisions


def _precision(
    precision: Any,
    plugin: Precision | None,
    accelerator: Accelerator,
    device: torch.device,
    owner: str,
    strategy: Strategy,
    *,
    check: bool,
) -> Precision:
    name = "32-true" if precision is None else precision_name(precision, owner)
    if plugin is None:
        made = _named_precision(name, precision, accelerator, device, owner, strategy, check=check)
    elif precision is None or name == plugin.precision:
        made = plugin
    else:
        what = f"{owner}(precision={precision!r}, plugins=[{type(plugin).__name__}]): both set the precision."
        raise MisconfigurationException(what, fix="Leave one out.", argument="precision")
    if check:
        _prefix_owner(owner, made.check_device, device)
    return made


def _named_precision(
    name: str,
    written: object,
    accelerator: Accelerator,
    device: torch.device,
    owner: str,
    strategy: Strategy,
    *,
    check: bool,
) -> Precision:
    """Return the precision of a name: the accelerator's, the strategy's or the usual one."""
    if name == "32-true":
        return Precision()
    if (of_device := _prefix_owner(owner, accelerator.precision_of, name)) is not None:
        return of_device
    if name == "64-true":
        if device.type == "mps":
            what = f"{owner}(precision={written!r}): MPS has no 64-bit floats."
            raise MisconfigurationException(what, fix="Use precision='32-true'.", argument="precision")
        return DoublePrecision()
    if (of_strategy := strategy.precision_of(name, device.type)) is not None:
        return of_strategy
    if is_half(name):
        return HalfPrecision(name, keep_small_updates=not conventions.current().updates_are_rounded)
    if name in ("fp8", "transformer-engine", "transformer-engine-float16"):
        from hasten.precision.float8 import Float8Precision, check_float8
        from hasten.precision.transformer_engine import TransformerEnginePrecision

        # Checked before the package is imported: the device may not support it at all.
        if check:
            _prefix_owner(owner, check_float8, device, name)
        dtype = torch.float16 if name.endswith("float16") else torch.bfloat16
        return Float8Precision() if name == "fp8" else TransformerEnginePrecision(weights_dtype=dtype)
    if name == "16-mixed" and device.type == "cpu":
        rank_zero_warn(
            f"{owner}(precision={written!r}, accelerator='cpu'): AMP with fp16 is not supported on CPU: its "
            "gradient scaler needs a GPU. Using precision='bf16-mixed'."
        )
        name = "bf16-mixed"
    assert is_mixed(name)
    return MixedPrecision(name, device.type)


def precision_name(precision: PrecisionName | str | int, owner: str) -> str:
    text = str(precision).lower()
    written = isinstance(precision, (str, int)) and not isinstance(precision, bool)
    for name, spellings in PRECISIONS.items():
        if written and text in spellings:
            if text in ("16", "bf16") and conventions.current().warns_of_settings:
                rank_zero_warn(f"{owner}(precision={precision!r}) is supported for historical reasons: write {name!r}.")
            return name
    from hasten.precision.bitsandbytes import MODES

    given = f"{owner}(precision={check.shown(precision)})"
    if not written:
        fix = f"use one of {_listed(PRECISIONS)}, not {type(precision).__name__}."
        near = _OTHER_PRECISIONS.get(text)
        if type(precision).__name__ == "dtype" and near is not None:
            both = [name for name in (near.replace("-true", "-mixed"), near) if name in PRECISIONS]
            fix = f"use a string, {' or '.join(map(repr, both))}."
        raise WrongType(f"{given}:", fix=fix, argument="precision")
    if text in MODES:
        fix = f"Use plugins=BitsandbytesPrecision({text!r})."
        raise MisconfigurationException(f"{given}: a plugin quantizes weights.", fix=fix, argument="precision")
    allowed = [spelling for spellings in PRECISIONS.values() for spelling in spellings]
    what, fix = _unknown(given, text, allowed, f"use one of {_listed(allowed)}.", _OTHER_PRECISIONS)
    raise MisconfigurationException(what, fix=fix, argument="precision")


# What torch and other libraries call them.
_OTHER_PRECISIONS = {
    "float16": "16-mixed", "amp": "16-mixed", "mixed": "16-mixed", "fp16-mixed": "16-mixed", "16bit": "16-mixed",
    "torch.float16": "16-true", "bfloat16": "bf16-mixed", "torch.bfloat16": "bf16-true", "float32": "32-true",
    "fp32": "32-true", "torch.float32": "32-true", "float": "32-true", "float64": "64-true", "fp64": "64-true",
    "torch.float64": "64-true", "float8": "fp8", "int8": "bf16-mixed",
}  # fmt: skip


def _unknown(
    shown: str, word: str, allowed: Iterable[str], otherwise: str, other_names: Mapping[str, str]
) -> tuple[str, str]:
    """Return what ``unknown_word`` does for a word, which may be the name that other libraries have for one."""
    if word in other_names:
        return f"{shown}: {word!r} is unknown.", f"Did you mean {other_names[word]!r}?"
    return unknown_word(shown, word, allowed, otherwise)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
