"""Weights and optimizer state of a DeepSpeed engine, by parameter: out of its flat buffers and back into them.

ZeRO concatenates parameters and gives each process a part of the elements, in 32 bits, with the optimizer's state for
them. A checkpoint has the same names, shapes and entries as without ZeRO, so that any number of processes and any
strategy can read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten.checkpoint.flat import flat_part
from hasten.checkpoint.stored import StoredTensor

# In the state of an optimizer: what belongs to the engine. Other strategies leave it out.
ENGINE_KEY = "deepspeed"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class OwnRange(NamedTuple):
    """The elements of a parameter that this process steps."""

    # The 32-bit buffer that the optimizer steps, and where in it they are.
    buffer: Tensor
    offset: int
    # Where in the parameter they are, if it had one dimension, and how many there are.
    start: int
    size: int

    def of(self, buffer: Tensor) -> Tensor:
        """Return the elements in a buffer that is laid out as the optimizer's."""
        return buffer.narrow(0, self.offset, self.size)


class EngineState:
    """The entries of a checkpoint that belong to an engine, and how they are restored.

    ``groups`` has for each group of the optimizer its parameters before the engine was made.
    """

    def __init__(self, engine: nn.Module, groups: list[list[nn.Parameter]]) -> None:
        self._engine = cast(Any, engine)
        self._groups = groups
        self._zero: Any = self._engine.optimizer
        self._stage = int(self._engine.zero_optimization_stage())
        self._trained = {id(parameter) for group in groups for parameter in group if parameter.requires_grad}
        # Once the engine has ended: its parts by parameter, and its own state.
        self._parts: dict[int, OwnRange | None] | None = None
        self._own: dict[str, Any] = {}

    def end(self) -> None:
        """Save what a checkpoint needs before the engine ends; its buffers stay."""
        if self._parts is None:
            self._own = self._own_state()
            every = (parameter for group in self._groups for parameter in group if self.is_trained(parameter))
            self._parts = {id(parameter): self.part(parameter) for parameter in every}
            self._engine = self._zero = None

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer steps a parameter."""
        return id(parameter) in self._trained

    def part(self, parameter: nn.Parameter) -> OwnRange | None:
        """Return the elements that this process steps; None where there are none."""
        of: Any = parameter
        if self._parts is not None:
            return self._parts[id(parameter)]
        if self._stage < 3:
            mapping = of._hp_mapping
            if mapping is None:
                return None
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            buffer = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
            return OwnRange(buffer, int(here.start), int(there.start), int(here.numel))
        group, offset, padded = self._zero.grad_position[self._zero.get_param_id(of)]
        start = int(padded) * _rank_of(of)
        size = min(int(padded), int(of.ds_numel) - start)
        return OwnRange(self._zero.fp32_partitioned_groups_flat[group], int(offset), start, size) if size > 0 else None

    # -- weights

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """Return this process's elements of a trained parameter, in the 32 bits that the optimizer steps."""
        part = self.part(parameter)
        elements = torch.empty(0) if part is None else part.of(part.buffer)
        if self._parts is not None and part is not None:
            # The program may have changed the weights since.
            present = _elements(parameter, part).to(elements.device)
            elements = torch.where(elements.to(present.dtype) == present, elements, present.to(elements.dtype))
        return flat_part(elements, shape_of(parameter), 0 if part is None else part.start)

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: object) -> None:
        """Give a parameter, and the 32 bits that the optimizer steps, the values of a whole tensor of a checkpoint."""
        whole: Any = read(value)
        if self.is_trained(parameter) and (part := self.part(parameter)) is not None:
            part.of(part.buffer).copy_(whole.reshape(-1)[part.start : part.start + part.size])
        set_parameter(parameter, whole)

    # -- the optimizer

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in torch's form: parameters are numbered, tensors are this process's elements."""
        numbers = itertools.count()
        numbered = [[next(numbers) for _ in parameters] for parameters in self._groups]
        states, keys = {}, self._agreed_keys(optimizer)
        for parameters, own_numbers in zip(self._groups, numbered, strict=True):
            for parameter, number in zip(parameters, own_numbers, strict=True):
                if self.is_trained(parameter) and keys:
                    states[number] = self._entry(optimizer, parameter, keys)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": own_numbers}
            for group, own_numbers in zip(self._hyper_parameters(optimizer), numbered, strict=True)
        ]
        return {"state": states, "param_groups": groups, ENGINE_KEY: self._own_state()}

    def _hyper_parameters(self, optimizer: Any) -> list[dict[str, Any]]:
        """Return the groups of the optimizer; the engine removes those without parameters."""
        left = iter(optimizer.param_groups)
        return [next(left) if parameters else {} for parameters in self._groups]

    def _agreed_keys(self, optimizer: Any) -> dict[str, bool]:
        """Return the names of the state's entries, and which are one number for each element.

        A process without elements of a parameter has no state from which it could know them.
        """
        for buffer, entries in optimizer.state.items():
            return {key: isinstance(each, Tensor) and each.shape == buffer.shape for key, each in entries.items()}
        return {}

    def _entry(self, optimizer: Any, parameter: nn.Parameter, keys: dict[str, bool]) -> dict[str, Any]:
        part, shape = self.part(parameter), shape_of(parameter)
        entries: Mapping[str, Any] = {} if part is None else optimizer.state.get(part.buffer, {})
        found: dict[str, Any] = {}
        for key, is_by_element in keys.items():
            value = entries.get(key)
            if is_by_element:
                elements = part.of(value) if part is not None and value is not None else torch.empty(0)
                found[key] = flat_part(elements, shape, part.start if part is not None else 0)
            else:
                found[key] = self._scalar(optimizer, key) if value is None else _copied(value)
        return found

    def _scalar(self, optimizer: Any, key: str) -> Any:
        """Return an entry that all parameters share, such as the number of steps."""
        return next((_copied(each[key]) for each in optimizer.state.values() if key in each), None)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Restore the optimizer from the state in torch's form, of this or another strategy."""
        saved = state["param_groups"]
        sizes = [len(parameters) for parameters in self._groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise make_error(
                ValueError,
                f"The state of {type(optimizer).__name__} in the checkpoint does not fit: its groups have "
                f"{[len(group['params']) for group in saved]} parameters, and those here {sizes}.",
                fix="Resume with the same parameter groups.",
            )
        for group, present in zip(saved, self._hyper_parameters(optimizer), strict=True):
            present.update({key: value for key, value in group.items() if key != "params"})
        parameters = [parameter for group in self._groups for parameter in group]
        keys = [key for group in saved for key in group["params"]]
        entries = state.get("state", {})
        shared: dict[tuple[int, str], Any] = {}
        for parameter, key in zip(parameters, keys, strict=True):
            if key in entries and self.is_trained(parameter):
                self._load_entry(optimizer, parameter, entries[key], shared)
        self._load_own_state(state.get(ENGINE_KEY) or {})

    @torch.no_grad()
    def _load_entry(
        self, optimizer: Any, parameter: nn.Parameter, entry: Mapping[str, Any], shared: dict[tuple[int, str], Any]
    ) -> None:
        part, shape = self.part(parameter), torch.Size(shape_of(parameter))
        if part is None:
            return
        present = optimizer.state[part.buffer]
        for key, stored in entry.items():
            if getattr(stored, "shape", None) == shape and not (not shape and key == "step"):
                whole = read(stored)
                if key not in present:
                    present[key] = torch.zeros_like(part.buffer, dtype=whole.dtype)
                part.of(present[key]).copy_(whole.reshape(-1)[part.start : part.start + part.size])
                continue
            value = read(stored)
            if isinstance(present.get(key), int) and isinstance(value, Tensor):
                value = int(value)  # Other optimizers of the same kind count with a tensor.
            known = shared.setdefault((id(part.buffer), key), value)
            if not bool(known == value):
                raise make_error(
                    ValueError,
                    f"The state of {type(optimizer).__name__} in the checkpoint has another {key!r} for some "
                    f"parameters ({known} and {value}), and DeepSpeed keeps one for all.",
                    fix="Load the weights alone.",
                )
            present[key] = _copied(value)

    def _own_state(self) -> dict[str, Any]:
        if self._parts is not None:
            return self._own
        engine = self._engine
        own: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
        scaler = vars(getattr(self._zero, "loss_scaler", object())) if engine.fp16_enabled() else {}
        own["loss_scaler"] = {key: value for key, value in scaler.items() if isinstance(value, (int, float, bool))}
        if engine.lr_scheduler is not None:
            own["lr_scheduler"] = engine.lr_scheduler.state_dict()
        return own

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            if name in own:
                setattr(self._engine, name, own[name])
        if own.get("loss_scaler") and self._engine.fp16_enabled():
            vars(self._zero.loss_scaler).update(own["loss_scaler"])
        if self._engine.lr_scheduler is not None and "lr_scheduler" in own:
            self._engine.lr_scheduler.load_state_dict(own["lr_scheduler"])


# -- parameters that may be divided


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a whole parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_divided(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one that stage 3 divides over the processes."""
    return hasattr(parameter, "ds_id")


def own_elements(parameter: nn.Parameter) -> Tensor:
    """Return this process's elements of a parameter that stage 3 has divided."""
    held, start, size = _own_range(parameter)
    return flat_part(held.detach().reshape(-1)[:size], shape_of(parameter), start)


def _own_range(parameter: Any) -> tuple[Tensor, int, int]:
    """Return the memory of this process's elements of a divided parameter, where they begin, and how many they are."""
    held = parameter.ds_tensor
    start = held.numel() * _rank_of(parameter)
    return held, start, max(0, min(held.numel(), int(parameter.ds_numel) - start))


def _elements(parameter: Any, part: OwnRange) -> Tensor:
    """Return the elements of a parameter, as the module holds them, that this process steps."""
    if is_divided(parameter):
        held: Tensor = parameter.ds_tensor.detach().reshape(-1)[: part.size]
        return held
    whole: Tensor = parameter.detach().reshape(-1)
    return whole[part.start : part.start + part.size]


@torch.no_grad()
def set_parameter(parameter: nn.Parameter, whole: Tensor) -> None:
    """Give a parameter the values of a whole tensor; one that is divided, this process's elements."""
    if not is_divided(parameter):
        parameter.copy_(whole)
        return
    held, start, size = _own_range(parameter)
    if size:
        held.reshape(-1)[:size].copy_(whole.reshape(-1)[start : start + size])
    if parameter.numel() == cast("Any", parameter).ds_numel:
        # A small one, which stays gathered.
        parameter.data.copy_(whole)


def read(value: object) -> Any:
    """Return a value of a checkpoint; a tensor of a folder is read whole."""
    return value.full() if isinstance(value, StoredTensor) else value


def parameters_by_name(module: nn.Module) -> dict[str, Any]:
    """Return what ``module.state_dict()`` names: parameters themselves, and other values."""
    named: dict[str, Any] = module.state_dict(keep_vars=True)
    return named


def _rank_of(parameter: Any) -> int:
    return int(torch.distributed.get_rank(parameter.ds_process_group))


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def groups_of(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters of each group of an optimizer."""
    return [list(group["params"]) for group in optimizer.param_groups]
