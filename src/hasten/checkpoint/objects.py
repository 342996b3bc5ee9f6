"""Python objects in checkpoint files: read by name, without running code that nobody has allowed."""

from __future__ import annotations

import _compat_pickle
import argparse
import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import ModuleType
from typing import IO, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.tree import AttributeDict
from hasten.extend.origin import full_name

# Entries of hyper-parameters: objects in them that are not allowed can be left out, because a run does not need them.
_HYPER_PARAMETERS = frozenset(
    {"hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments", "hparams_type",
     "datamodule_hparams_type"}
)  # fmt: skip

# Classes of plain data in older checkpoints of Lightning, by their names in the files.
_DATA: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "datetime.timedelta": datetime.timedelta,
    **{
        f"{module}.{kind}": pathlib.Path
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath")
    },
    **{
        f"{module}.AttributeDict": AttributeDict
        for module in (
            "pytorch_lightning.utilities.parsing",
            "lightning.pytorch.utilities.parsing",
            "lightning.fabric.utilities.data",
            "lightning_fabric.utilities.data",
            "hasten.module.hparams",
            "hasten._lib.tree",
        )
    },
}
# Never read, even if allowed: these modules can reach the system. torch does not read from them either.
_BLOCKED = frozenset({"nt", "os", "posix", "sys"})
# Messages do not say how to allow these: a file that names them may be an attack.
_SUSPICIOUS = _BLOCKED | {"builtins", "importlib", "runpy", "shutil", "socket", "subprocess"}


class NotRead:
    """Replaces an object in a file whose class has not been allowed; its class was neither imported nor run."""

    name: ClassVar[str]

    def __new__(cls, *_: object, **__: object) -> NotRead:
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"<{self.name}, not read>"


def not_read(value: object) -> list[str]:
    """Return the names of the classes and functions in ``value`` that were not read, each once.

    Example::

        >>> not_read({"lr": 0.1, "layers": [8, 8]})
        []

    """
    names: dict[str, None] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = one if isinstance(one, type) else type(one)
        if issubclass(kind, NotRead):
            names[kind.name] = None
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif not isinstance(one, (type, Tensor, str, int, float)):
            waiting += getattr(one, "__dict__", {}).values()
    return list(names)


def how_to_allow(names: list[str]) -> str:
    """Return the lines that allow classes by name, for messages; empty if they cannot be allowed.

    Example::

        >>> print(how_to_allow(["shapes.Circle"]))
        To allow it by name, write before loading:
            from shapes import Circle
            torch.serialization.add_safe_globals([Circle])

    """
    found = [name.rpartition(".") for name in names]
    if not found or any(not module or module.partition(".")[0] in _SUSPICIOUS for module, _, _ in found):
        return ""
    imports = "".join(f"\n    from {module} import {name}" for module, _, name in found)
    listed = ", ".join(name for _, _, name in found)
    what = "it" if len(found) == 1 else "them"
    return (
        f"To allow {what} by name, write before loading:{imports}\n    torch.serialization.add_safe_globals([{listed}])"
    )


def read(file: IO[bytes], map_location: Any, *, data: bool = True, leaves_out: bool = False) -> tuple[Any, list[str]]:
    """Read a file of ``torch.save`` without running code, except of what ``torch.serialization`` was made to allow.

    Unlike ``torch.load(weights_only=True)`` it reads subclasses of dict and list, too.

    ``data`` also reads simple classes that older checkpoints of Lightning hold, such as ``argparse.Namespace``;
    ``leaves_out`` accepts ``NotRead`` in hyper-parameters.

    Returns:
        The contents, and the names of the classes and functions in them that keep them from being used: ``NotRead``
        stands for those.

    """
    allowed = {**(_DATA if data else {}), **torch_private.allowed_globals(), **_users_globals()}
    refused: dict[str, None] = {}

    class Reader(NameReader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.allowed, self.refused = dict(allowed), refused

    # torch.load takes the place of pickle's functions from a module.
    module = cast("Any", ModuleType("hasten_reader"))
    module.Unpickler, module.load = Reader, lambda file, **kwargs: Reader(file, **kwargs).load()
    contents = torch.load(file, map_location=map_location, pickle_module=module, weights_only=False)
    if not refused:
        return contents, []
    if isinstance(contents, dict) and isinstance(contents.get("callbacks"), dict):
        # Lightning 1.x had classes for keys.
        contents["callbacks"] = {_key(key, refused): state for key, state in contents["callbacks"].items()}
    if not leaves_out or not isinstance(contents, dict):
        # Everything that was refused, in case an object hides it.
        return contents, not_read(contents) or list(refused)
    return contents, not_read({key: value for key, value in contents.items() if key not in _HYPER_PARAMETERS})


def _key(key: Any, refused: dict[str, None]) -> Any:
    """Return the name of a class of callbacks, or another key unchanged."""
    if isinstance(key, type) and issubclass(key, NotRead) and ".callbacks." in key.name:
        refused.pop(key.name, None)
        return key.name.rpartition(".")[2]
    return key


def _users_globals() -> dict[str, Any]:
    found = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            found[entry[1]] = entry[0]
        else:
            found[full_name(entry)] = entry
    return found


class NameReader(pickle._Unpickler):
    """Unpickles with allowed classes and functions; others are replaced by ``NotRead``.

    Instructions that change an object (its state, its items) can only change objects made here, never classes or
    functions.
    """

    allowed: dict[str, Any]
    refused: dict[str, None]
    # A method of pickle's own class.
    stack: list[Any]
    append: Any
    pop_mark: Any

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[(module, name)]
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        found = self.allowed.get(full)
        if found is None or module.partition(".")[0] in _BLOCKED:
            self.refused[full] = None
            found = self.allowed[full] = type("NotRead", (NotRead,), {"name": full})
        return found

    def _check(self, callee: Any) -> None:
        if not any(callee is one for one in self.allowed.values()):
            raise pickle.UnpicklingError(f"the file calls {callee!r}, which is not in the list of what it may call")

    def _made_here(self, thing: Any) -> bool:
        return not isinstance(thing, type) and any(type(thing) is one for one in self.allowed.values())

    def load_reduce(self) -> None:
        arguments, callee = self.stack.pop(), self.stack[-1]
        self._check(callee)
        self.stack[-1] = callee(*arguments)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self._check(kind)
        self.append(nn.Parameter(*arguments) if kind is nn.Parameter else kind.__new__(kind, *arguments))

    def load_newobj_ex(self) -> None:
        keywords, arguments, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._check(kind)
        self.append(kind.__new__(kind, *arguments, **keywords))

    def load_build(self) -> None:
        state, thing = self.stack.pop(), self.stack[-1]
        if isinstance(thing, NotRead):
            return
        if type(thing) in (Tensor, nn.Parameter):
            thing.__setstate__(state)
            return
        if not self._made_here(thing):
            raise pickle.UnpicklingError(f"the file sets the state of a {type(thing).__name__}")
        if hasattr(thing, "__setstate__"):
            thing.__setstate__(state)
            return
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if plain:
            vars(thing).update(plain)
        for name, value in (slots or {}).items():
            setattr(thing, name, value)

    def _items(self, items: list[Any], *, mapping: bool) -> None:
        thing = self.stack[-1]
        if isinstance(thing, NotRead):
            return
        kinds: tuple[type, ...] = (dict, OrderedDict, Counter) if mapping else (list, set)
        if type(thing) not in kinds and not (isinstance(thing, kinds) and self._made_here(thing)):
            raise pickle.UnpicklingError(f"the file puts items into a {type(thing).__name__}")
        if mapping:
            for key, value in zip(items[::2], items[1::2], strict=True):
                thing[key] = value
        elif isinstance(thing, set):
            thing.update(items)
        else:
            thing.extend(items)

    def load_append(self) -> None:
        self._items([self.stack.pop()], mapping=False)

    def load_appends(self) -> None:
        self._items(self.pop_mark(), mapping=False)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._items([key, value], mapping=True)

    def load_setitems(self) -> None:
        self._items(self.pop_mark(), mapping=True)

    def refuse(self) -> None:
        raise pickle.UnpicklingError("the file uses an instruction of pickle that torch.save does not write")

    for _opcode, _function in (
        (pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_newobj), (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.BUILD, load_build), (pickle.APPEND, load_append), (pickle.APPENDS, load_appends),
        (pickle.ADDITEMS, load_appends), (pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems),
        (pickle.INST, refuse), (pickle.OBJ, refuse), (pickle.EXT1, refuse), (pickle.EXT2, refuse),
        (pickle.EXT4, refuse),
    ):  # fmt: skip
        dispatch[_opcode[0]] = _function
    del _opcode, _function
