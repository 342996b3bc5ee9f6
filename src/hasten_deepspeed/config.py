"""The configuration of DeepSpeed's engine: the user's, joined with the settings of Trainer and Fabric."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hasten._lib import check
from hasten._lib.errors import make_error

# The variable that names a configuration file, as in Lightning.
CONFIG_VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"

# By precision: the section of the configuration that is enabled; neither computes in 32 bits.
_SECTIONS = {"16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}
_BATCHES, _CLIPPING, _MICRO = "gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"
# Sections with a loop or a loss of their own.
_OTHER_LOOPS = {
    "pipeline": "a pipeline owns forward and backward",
    "data_efficiency": "it replaces the loader",
    "curriculum_learning": "it changes the batches",
    "autotuning": "it starts the program many times",
    "elasticity": "it chooses the batch size",
}


def read_config(config: object) -> dict[str, Any] | None:
    """Return the configuration of ``DeepSpeedStrategy(config=...)``; without one, the file that the environment names.

    ``config`` is a dict, the path of a JSON file, or None.
    """
    given = "DeepSpeedStrategy(config=...)"
    if config is None and (path := os.environ.get(CONFIG_VARIABLE)):
        config, given = path, f"{CONFIG_VARIABLE}={path}"
    if config is None:
        return None
    if isinstance(config, (str, os.PathLike)):
        path = os.fspath(config)
        given = f"DeepSpeedStrategy(config={path!r})"
        if not os.path.isfile(path):
            what = f"{given}: there is no such file."
            fix = "Write the path of a JSON file, or a dict."
            raise make_error(FileNotFoundError, what, fix=fix, argument="config")
        with open(path, encoding="utf-8") as file:
            try:
                config = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(f"{given}: the file is not JSON: {error}.") from None
    if not isinstance(config, Mapping):
        what = f"{given}:"
        fix = f"use a dict or the path of a JSON file, not {type(config).__name__}."
        raise make_error(TypeError, what, fix=fix, argument="config")
    own: dict[str, Any] = copy.deepcopy(dict(config))
    for name, why in _OTHER_LOOPS.items():
        section = own.get(name)
        if section and not (isinstance(section, Mapping) and section.get("enabled") is False):
            raise make_error(
                ValueError, f"{given}: {name!r} is not for hasten's loop: {why}.", fix="Leave the section out."
            )
    if own.get("managed_gradient_accumulation"):
        what = f"{given}: 'managed_gradient_accumulation': hasten says when the optimizer steps."
        raise make_error(ValueError, what, fix="Leave it out.")
    stage = stage_of(own)
    if stage not in (1, 2, 3):
        what = f"{given}: 'zero_optimization' has stage {stage}."
        raise make_error(ValueError, what, fix="Use 1, 2 or 3; without ZeRO, write strategy='ddp'.", argument="config")
    return own


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO; 0 where it is off."""
    stage: int = (config.get("zero_optimization") or {}).get("stage", 0)
    return stage


def offload_of(config: Mapping[str, Any], part: str) -> str | None:
    """Return where ``"offload_optimizer"`` or ``"offload_param"`` go: "cpu" or "nvme"; None where they stay."""
    device = ((config.get("zero_optimization") or {}).get(part) or {}).get("device")
    return None if device in (None, "none") else str(device)


def forces_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer's state is offloaded, and DeepSpeed asks for an optimizer made for the host."""
    return offload_of(config, "offload_optimizer") is not None and config.get("zero_force_ds_cpu_optimizer", True)


def line_that_keeps_optimizer(config: Mapping[str, Any]) -> str:
    """Return a strategy, as written in a program, that offloads as ``config`` does with any optimizer."""
    said: dict[str, Any] = {"stage": stage_of(config)}
    for part in ("offload_optimizer", "offload_param"):
        if (device := offload_of(config, part)) is not None:
            path = config["zero_optimization"][part].get("nvme_path")
            said[part] = {"device": device} | ({"nvme_path": path} if device == "nvme" and path else {})
    whole = {
        "zero_optimization": said,
        "zero_force_ds_cpu_optimizer": False,
        # Subclasses, and most others, are not on DeepSpeed's list.
        "zero_allow_untested_optimizer": True,
    }
    return f"DeepSpeedStrategy(config={whole})"


class EngineSettings:
    """The configuration of a run: the user's, completed with values of a Trainer or Fabric."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._said = dict(config)
        self.config = copy.deepcopy(self._said)
        # hasten decides when the engine steps: accumulations end early, change, and belong to manual optimization.
        self.config["managed_gradient_accumulation"] = False
        # None switches off the line that the engine prints every ten steps.
        self.config.setdefault("steps_per_print", None)
        # Otherwise DeepSpeed clips gradients to a norm of 1; and what the Trainer or Fabric does not say is not "auto".
        for key, value in ((_CLIPPING, 0.0), (_BATCHES, 1)):
            if self.config.get(key, "auto") == "auto":
                self.config[key] = value
        zero = self.config["zero_optimization"]
        if zero["stage"] == 1:
            if zero.get("overlap_comm"):
                raise make_error(
                    ValueError,
                    "DeepSpeedStrategy: 'overlap_comm' with stage 1: gradients are reduced once, when the optimizer "
                    "steps.",
                    fix="Leave it out, or use stage=2.",
                )
            zero["overlap_comm"] = False

    def set_precision(self, name: str) -> None:
        """Enable what ``precision=name`` computes in."""
        wanted = _SECTIONS.get(name)
        for section in ("fp16", "bf16"):
            found = self.config.get(section) or {}
            enabled = found.get("enabled")
            if enabled not in (None, "auto") and bool(enabled) != (section == wanted):
                fits = {"fp16": "'16-mixed'", "bf16": "'bf16-mixed'"}[section] if enabled else "another one"
                raise make_error(
                    ValueError,
                    f"precision={name!r} and DeepSpeedStrategy(config={{{section!r}: {{'enabled': {enabled}}}}}): "
                    "they contradict each other.",
                    fix=f"Leave the section's 'enabled' out, or write precision={fits}.",
                    argument="precision",
                )
            if section == wanted:
                self.config[section] = {**found, "enabled": True}
            elif found:
                self.config[section] = {**found, "enabled": False}

    def take_accumulation(self, batches: int, owner: str) -> None:
        """Set the number of batches of an accumulation; ``owner`` has the argument ``accumulate_grad_batches``."""
        self._agree(_BATCHES, batches, f"{owner}(accumulate_grad_batches={batches})")

    def take_clipping(self, norm: float | None, owner: str) -> None:
        """Set the norm to which gradients are clipped; ``owner`` has the argument ``gradient_clip_val``."""
        if not norm and self._said.get(_CLIPPING, "auto") != "auto":
            return  # The engine clips, and the Trainer was not asked to.
        self._agree(_CLIPPING, float(norm or 0.0), f"{owner}(gradient_clip_val={norm})")

    def take_batch_size(self, size: int | None, world_size: int) -> int:
        """Return the samples of a batch on a process, which the engine's throughput is computed from.

        Raises:
            ValueError: the configuration has another one.

        """
        said = self._said.get(_MICRO)
        if size is None:
            size = said if isinstance(said, int) else 1
        self._agree(_MICRO, size, f"the train dataloader's batch_size={size}")
        batches = self.config.get(_BATCHES, 1)
        whole = size * world_size * batches
        shown = f"batch_size={size} * accumulate_grad_batches={batches} * {world_size} process(es)"
        self._agree("train_batch_size", whole, shown)
        return size

    def _agree(self, key: str, value: Any, said: str) -> None:
        found = self._said.get(key, "auto")
        if found not in ("auto", None) and found != value:
            what = f"{said} and DeepSpeedStrategy(config={{{key!r}: {found!r}}}): they contradict each other."
            raise make_error(ValueError, what, fix=f"Leave {key!r} out of the configuration; hasten sets it.")
        self.config[key] = value

    def check(self) -> None:
        """Raise ValueError for values that are still "auto", which other libraries fill in."""
        if (place := next(_autos(self.config), None)) is not None:
            what = f"DeepSpeedStrategy(config=...): {place} is 'auto', and hasten has no value for it."
            fix = "Write the value, or leave it out for DeepSpeed's default."
            raise make_error(ValueError, what, fix=fix, argument="config")


def _autos(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if value == "auto":
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")


# -- the arguments of the strategy

_FLAGS = (
    "zero_optimization", "offload_optimizer", "offload_parameters", "single_submit", "overlap_events", "pin_memory",
    "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter", "zero_allow_untested_optimizer",
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
)  # fmt: skip
_SIZES = (
    "params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size", "queue_depth",
    "thread_count", "sub_group_size", "allgather_bucket_size", "reduce_bucket_size", "initial_scale_power",
    "loss_scale_window", "hysteresis", "min_loss_scale",
)  # fmt: skip
# Arguments that the configuration holds.
OF_CONFIG = frozenset(
    {*_FLAGS, *_SIZES, "stage", "offload_params_device", "nvme_path", "offload_optimizer_device", "loss_scale"}
)


def config_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that the arguments of the strategy describe."""
    owner = "DeepSpeedStrategy"
    for name in _FLAGS:
        check.boolean(owner, name, given[name])
    for name in _SIZES:
        check.whole(owner, name, given[name], at_least=0 if name == "initial_scale_power" else 1)
    if not given["zero_optimization"]:
        what = "DeepSpeedStrategy(zero_optimization=False): that divides nothing."
        raise make_error(ValueError, what, fix="Use strategy='ddp'.", argument="zero_optimization")
    check.one_of(owner, "stage", given["stage"], (1, 2, 3))
    for name in ("offload_params_device", "offload_optimizer_device"):
        check.one_of(owner, name, given[name], ("cpu", "nvme"))
    if given["remote_device"] is not None:
        check.one_of(owner, "remote_device", given["remote_device"], ("cpu", "nvme"))
    stage = given["stage"]
    if stage < 3 and given["offload_parameters"]:
        raise make_error(
            ValueError,
            f"DeepSpeedStrategy(stage={stage}, offload_parameters=True): parameters are divided, and kept elsewhere, "
            "with stage=3 alone.",
            fix="Use stage=3, or leave offload_parameters out.",
            argument="stage",
        )
    zero: dict[str, Any] = {
        name: given[name]
        for name in (
            "stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter",
            "allgather_bucket_size", "reduce_bucket_size", "sub_group_size",
        )
    }  # fmt: skip
    if stage == 1:
        zero["overlap_comm"] = False
    if given["offload_parameters"]:
        zero["offload_param"] = {
            "device": given["offload_params_device"],
            "nvme_path": given["nvme_path"],
            "buffer_count": given["params_buffer_count"],
            "buffer_size": given["params_buffer_size"],
            "max_in_cpu": given["max_in_cpu"],
            "pin_memory": given["pin_memory"],
        }
    if given["offload_optimizer"]:
        zero["offload_optimizer"] = {
            "device": given["offload_optimizer_device"],
            "nvme_path": given["nvme_path"],
            "buffer_count": given["optimizer_buffer_count"],
            "pin_memory": given["pin_memory"],
        }
    return {
        "zero_allow_untested_optimizer": given["zero_allow_untested_optimizer"],
        "zero_optimization": zero,
        "activation_checkpointing": {
            "partition_activations": given["partition_activations"],
            "cpu_checkpointing": given["cpu_checkpointing"],
            "contiguous_memory_optimization": given["contiguous_memory_optimization"],
            "synchronize_checkpoint_boundary": given["synchronize_checkpoint_boundary"],
        },
        "aio": {
            name: given[name]
            for name in ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
        },
        "fp16": {
            "loss_scale": given["loss_scale"],
            "initial_scale_power": given["initial_scale_power"],
            "loss_scale_window": given["loss_scale_window"],
            "hysteresis": given["hysteresis"],
            "min_loss_scale": given["min_loss_scale"],
        },
    }
