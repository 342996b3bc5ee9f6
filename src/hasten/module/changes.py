"""Changes of a module during training that its state_dict does not contain, for checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from hasten._lib import torch_private
from hasten.logged_value import is_metric
from hasten.module.module import LightningModule
from hasten.seed import is_kind_of_generator, set_state_of_generator, state_of_generator

_SIMPLE = (bool, int, float, complex, str, type(None))
_OF_TORCH = frozenset(nn.Module().__dict__)


@functools.cache
def _of_base() -> frozenset[str]:
    return _OF_TORCH | frozenset(vars(LightningModule()))


class ModuleChanges:
    """Which parameters hooks have frozen, which parts they have switched to eval mode, and numbers they have set.

    Generators of random numbers that are attributes of the module or its parts are saved, too.

    A checkpoint holds what differs from the beginning of training, and a resumed run sets that, once its own training
    begins. So what a program does before training, such as freezing a part, also takes effect in the resumed run.

    Attributes that are numbers, strings, booleans or None are saved: those of the LightningModule, and of parts that
    have no other attributes except generators. A part that also has tensors, lists or objects may have computed these
    from them.

    Args:
        module: the LightningModule.

    Example::

        >>> module = LightningModule()
        >>> changes = ModuleChanges(module)
        >>> changes.begin()
        >>> module.temperature = 0.5
        >>> changes.state_dict()["attributes"]
        {'': {'temperature': 0.5}}

    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._before: dict[str, dict[str, Any]] | None = None
        self._loaded: Mapping[str, Mapping[str, Any]] = {}
        # The modes during training: an evaluation switches them.
        self._modes: dict[str, Any] = {}

    def begin(self) -> None:
        """Record the state of the module when training begins, and restore what ``load_state_dict`` was given."""
        self._before = self._look()
        loaded, self._loaded = self._loaded, {}
        if not loaded:
            return
        parameters, parts = dict(self._module.named_parameters()), dict(self._module.named_modules())
        for name, requires_grad in loaded.get("requires_grad", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(requires_grad)
        for name, training in loaded.get("modes", {}).items():
            if name in parts:
                parts[name].training = training
        for name, attributes in loaded.get("attributes", {}).items():
            for attribute, value in attributes.items() if name in parts else ():
                setattr(parts[name], attribute, value)
        generators = self._before["generators"]
        for place, state in loaded.get("generators", {}).items():
            if place in generators:
                set_state_of_generator(generators[place], state)

    def state_dict(self, *, evaluating: bool = False) -> dict[str, dict[str, Any]]:
        """Return what has changed since training began, as plain data by name.

        Args:
            evaluating: take the modes of the last call without it, which was made before the evaluation.

        """
        if self._before is None:
            return {kind: dict(found) for kind, found in self._loaded.items()}
        now, before = self._look(), self._before
        self._modes = now["modes"] = self._modes if evaluating else now["modes"]
        if now == before and not now["generators"]:
            return {}
        changed: dict[str, dict[str, Any]] = {
            kind: _differing(now[kind], before[kind]) for kind in ("requires_grad", "modes")
        }
        changed["attributes"] = {}
        for name, found in now["attributes"].items():
            if different := _differing(found, before["attributes"].get(name, {})):
                changed["attributes"][name] = different
        changed["generators"] = {place: state_of_generator(one) for place, one in now["generators"].items()}
        # Few entries, which a checkpoint writes one by one.
        return {kind: found for kind, found in changed.items() if found}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Store what ``state_dict`` returned, for ``begin`` to set."""
        self._loaded = state

    def _look(self) -> dict[str, dict[str, Any]]:
        """Return the present state. Written with few calls, to keep a short fit cheap."""
        found: dict[str, dict[str, Any]] = {"requires_grad": {}, "modes": {}, "attributes": {}, "generators": {}}
        for name, part in self._module.named_modules():
            found["modes"][name] = part.training
            for own, parameter in part._parameters.items():
                if parameter is not None:
                    found["requires_grad"][f"{name}.{own}" if name else own] = parameter.requires_grad
            ignored = _of_base() if part is self._module else _OF_TORCH
            simple, is_simple = {}, True
            for key, value in vars(part).items():
                if key in ignored:
                    continue
                if isinstance(value, _SIMPLE):
                    simple[key] = value
                    continue
                kind: Any = type(value)
                if is_kind_of_generator(kind):
                    found["generators"][f"{name}.{key}"] = value
                else:
                    is_simple = False
            if simple and (part is self._module or (is_simple and not torch_private.has_buffers_not_saved(part))):
                found["attributes"][name] = {} if is_metric(part) else simple
        return found


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    if now == before:
        return {}
    absent = object()
    return {key: value for key, value in now.items() if not _same(value, before.get(key, absent))}


def _same(one: Any, other: Any) -> bool:
    # NaN does not equal itself.
    return one is other or (type(one) is type(other) and (one == other or (one != one and other != other)))
