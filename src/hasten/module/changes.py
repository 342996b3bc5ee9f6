"""Changes of a module during training that its state_dict does not contain, for checkpoints."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from hasten._lib import torch_private
from hasten.logged_value import is_metric
from hasten.module.module import LightningModule
from hasten.seed import is_kind_of_generator, set_state_of_generator, state_of_generator

_SIMPLE = frozenset({bool, int, float, complex, str, type(None)})
_OF_TORCH = frozenset(nn.Module().__dict__)


@functools.cache
def _of_base() -> frozenset[str]:
    return _OF_TORCH | frozenset(vars(LightningModule()))


class ModuleChanges:
    """Which parameters hooks have frozen, which parts they have switched to eval mode, and numbers they have set.

    Generators of random numbers that are attributes of the module or its parts are saved, too.

    A checkpoint holds what differs from the beginning of training, and a resumed run sets that, once its own training
    begins. So what a program does before training, such as freezing a part, also takes effect in the resumed run.

    Attributes that are numbers (also of NumPy), strings, booleans, None or members of an Enum are saved: those of the
    LightningModule, and of parts that have no other attributes except generators. A part that also has tensors, lists
    or objects may have computed these from them. A member is restored by its value, where the attribute is a member of
    the same Enum when training begins.

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
        self._sanity_check: tuple[dict[str, dict[str, Any]], ...] = ()

    def before_sanity_check(self) -> None:
        """Record the state before the validation that a resumed run does not repeat."""
        self._sanity_check = (self._look(),)

    def after_sanity_check(self) -> None:
        """Record the state after it: what the hooks of the check have changed counts as changed by training."""
        self._sanity_check = (*self._sanity_check, self._look())

    def begin(self) -> None:
        """Record the state of the module when training begins, and restore what ``load_state_dict`` was given."""
        self._before = self._look()
        if len(self._sanity_check) == 2:
            _undo(self._before, *self._sanity_check)
        self._sanity_check = ()
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
                _restore(parts[name], attribute, value)
        generators = self._before["generators"]
        for place, state in loaded.get("generators", {}).items():
            if place in generators:
                set_state_of_generator(generators[place], state)

    def state_dict(self, *, evaluating: bool = False) -> dict[str, dict[str, Any]]:
        """Return what has changed since training began, as plain data by name.

        With ``evaluating``, it takes the modes of the last call without it, which was made before the evaluation.
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
                changed["attributes"][name] = {key: _as_plain(value) for key, value in different.items()}
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
            simple, is_simple = {}, not is_metric(part)
            for key, value in vars(part).items():
                if key in ignored:
                    continue
                kind: Any = type(value)
                if kind in _SIMPLE or _is_stored(kind, value):
                    simple[key] = value
                    continue
                if is_kind_of_generator(kind):
                    found["generators"][f"{name}.{key}"] = value
                else:
                    is_simple = False
            if simple and (part is self._module or (is_simple and not torch_private.has_buffers_not_saved(part))):
                found["attributes"][name] = simple
        return found


@functools.cache
def _has_plain_form(kind: type) -> bool:
    """Return whether objects of this class can be stored as plain data: members of an Enum, numbers of NumPy."""
    numpy = sys.modules.get("numpy")
    return issubclass(kind, Enum) or (numpy is not None and issubclass(kind, (numpy.number, numpy.bool_)))


def _is_stored(kind: type, value: Any) -> bool:
    """Return whether it is such an object whose value is plain data; a long double's, for instance, is not."""
    return _has_plain_form(kind) and type(value.value if isinstance(value, Enum) else value.item()) in _SIMPLE


def _as_plain(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Enum):
        return {"enum": type(value).__qualname__, "value": value.value}
    return {"numpy": value.dtype.name, "value": value.item()}


def _restore(part: nn.Module, attribute: str, saved: Any) -> None:
    """Set an attribute to what ``_as_plain`` returned; a member of another Enum than it has now is left."""
    value = saved
    if isinstance(saved, Mapping) and "numpy" in saved:
        import numpy

        value = numpy.dtype(saved["numpy"]).type(saved["value"])
    elif isinstance(saved, Mapping):
        kind = type(getattr(part, attribute, None))
        if not issubclass(kind, Enum) or kind.__qualname__ != saved["enum"]:
            return
        try:
            value = kind(saved["value"])
        except ValueError:
            return  # the Enum of this program has no such member
    setattr(part, attribute, value)


def _undo(now: dict[str, dict[str, Any]], earlier: dict[str, dict[str, Any]], later: dict[str, dict[str, Any]]) -> None:
    """Set in ``now`` what changed from ``earlier`` to ``later`` to what it was earlier, unless it changed again."""
    if earlier == later:
        return
    kinds = [(now[kind], earlier[kind], later[kind]) for kind in ("requires_grad", "modes")]
    kinds += [
        (found, earlier["attributes"].get(name, {}), later["attributes"].get(name, {}))
        for name, found in now["attributes"].items()
    ]
    for values, old, new in kinds:
        for key, value in _differing(new, old).items():
            if key not in values or not _same(values[key], value):
                continue
            if key in old:
                values[key] = old[key]
            else:
                del values[key]


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    if now == before:
        return {}
    absent = object()
    return {key: value for key, value in now.items() if not _same(value, before.get(key, absent))}


def _same(one: Any, other: Any) -> bool:
    # NaN does not equal itself.
    return one is other or (type(one) is type(other) and (one == other or (one != one and other != other)))
