"""Lightning's modules: found by a finder, made from a table, and filled with hasten's objects."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.optional import hidden
from hasten.elsewhere.conventions import use
from hasten.extend import frames
from hasten_lightning.conventions import LIGHTNING
from hasten_lightning.facades import annotate, original
from hasten_lightning.names import PRODUCTS, VERSION, alternative_to, read_table

# Lightning's packages, and where each begins in the table: pytorch_lightning is lightning.pytorch.
ROOTS = {"lightning": "", "pytorch_lightning": "pytorch", "lightning_fabric": "fabric"}
_DISTRIBUTIONS = ("lightning", "pytorch-lightning", "lightning-fabric")

# Module, without its root -> its names -> (module of hasten, name there). A module that only holds others has no names.
TABLE = read_table()


def relative(name: str) -> str | None:
    """Return a module's place in the table, for instance ``"pytorch.callbacks"``; None for other packages."""
    root, _, rest = name.partition(".")
    start = ROOTS.get(root)
    return None if start is None else ".".join(filter(None, (start, rest)))


# What a program has replaced: (module of Lightning, name) -> modules of hasten, the names there, and what they were.
_REPLACED: dict[tuple[str, str], list[tuple[ModuleType, str, Any]]] = {}


def with_types(value: object) -> object:
    """Return a class whose ``__init__`` is annotated with types, not with their names: programs read them."""
    init = getattr(value, "__init__", None) if isinstance(value, type) else None
    if isinstance(init, FunctionType) and any(isinstance(each, str) for each in init.__annotations__.values()):
        # Names that are imported for type checkers only have no type here.
        with suppress(NameError, AttributeError, TypeError):
            hints = get_type_hints(init, include_extras=True)
            annotate(init, **{name: hints[name] for name in init.__annotations__ if name != "return"})
    return value


# Modules that those of Lightning import: tests replace their functions, as by `mock.patch("lightning...torch.load")`.
_PATCHED_THROUGH = frozenset(
    {"inspect", "json", "logging", "os", "shutil", "signal", "socket", "subprocess", "sys", "time", "torch", "warnings"}
)


def _flags() -> dict[str, Any]:
    """Return which packages are installed, by names that every module of Lightning has."""
    return vars(importlib.import_module("hasten.utilities.imports"))


def _module_of_flag(name: str) -> str | None:
    """Return the module whose presence a flag such as ``_RICH_AVAILABLE`` tells; None for other names."""
    if not (name.startswith("_") and name.endswith("_AVAILABLE")):
        return None
    module = name.removesuffix("_AVAILABLE").removesuffix("_SIGNATURES").lower()[1:]
    return "comet_ml" if module == "comet" else module


class AliasModule(ModuleType):
    """A module of Lightning with hasten's objects, which are imported when they are first used."""

    def __getattr__(self, name: str) -> Any:
        place = relative(self.__name__)
        row = TABLE.get(place or "", {})
        if name in row:
            home, there = row[name]
            value = with_types(getattr(importlib.import_module(home), there))
            self.__dict__[name] = value
            return value
        if name == "__all__":
            return sorted(public for public in row if not public.startswith("_"))
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if ".".join(filter(None, (place, name))) in TABLE:
            # Programs use `lightning.pytorch.callbacks` after `import lightning` alone.
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("_") and name.isupper() and (flag := _flags().get(name)) is not None:
            return flag
        if name in _PATCHED_THROUGH and place is not None and "." in place:
            return importlib.import_module(name)
        raise AttributeError(missing(f"{self.__name__}.{name}"))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name here and where hasten uses it, so that programs can replace parts of Lightning."""
        super().__setattr__(name, value)
        if (module := _module_of_flag(name)) is not None:
            (hidden.discard if value else hidden.add)(module)
        places = [] if isinstance(value, AliasModule) else _places(self.__name__, name)
        if places:
            originals = [(home, there, getattr(home, there)) for home, there in places]
            _REPLACED.setdefault((self.__name__, name), originals)
        for home, there in places:
            setattr(home, there, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        hidden.discard(_module_of_flag(name) or "")
        for home, there, before in _REPLACED.pop((self.__name__, name), ()):
            setattr(home, there, before)

    def __dir__(self) -> list[str]:
        place = relative(self.__name__) or ""
        return sorted({*super().__dir__(), *TABLE.get(place, ()), *_submodules(place)})


def restore() -> None:
    """Undo what programs have replaced in modules of Lightning."""
    for places in _REPLACED.values():
        for home, there, before in places:
            setattr(home, there, before)
    _REPLACED.clear()
    hidden.clear()


def _places(module: str, name: str) -> list[tuple[ModuleType, str]]:
    """Return where hasten has a name of a module of Lightning: its modules, and the name there."""
    row = TABLE.get(relative(module) or "", {})
    homes = row.values() if name in _PATCHED_THROUGH else [row[name]] if name in row else []
    found = [(importlib.import_module(home), there) for home, there in homes]
    if name not in _PATCHED_THROUGH:
        return found
    # A module of Python: where the classes and functions of this module use it.
    users = {getattr(original(getattr(home, there)), "__module__", "") for home, there in found}
    return [(sys.modules[user], name) for user in users if user in sys.modules and name in vars(sys.modules[user])]


def missing(full_name: str) -> str:
    """Return the message for a name or module of Lightning that hasten does not have."""
    parent, _, name = full_name.rpartition(".")
    advice = alternative_to(relative(full_name) or "")
    if advice is None:
        known = relative(parent) or ""
        there_are = [*TABLE.get(known, ()), *_submodules(known)]
        # The names of classes and modules often differ only in case.
        alike = [other for other in there_are if other[0].isupper() == name[0].isupper()]
        advice = (did_you_mean(name, alike) or did_you_mean(name, there_are)).strip()
    return f"hasten has no {full_name}. {advice or 'See docs/compat.md for what hasten has.'}"


def _submodules(place: str) -> list[str]:
    return [name.rpartition(".")[2] for name in TABLE if name and name.rpartition(".")[0] == place]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table, and the versions for ``importlib.metadata``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        place = relative(fullname)
        if place is None:
            return None
        if place in TABLE:
            # All are packages: for a name that `from ... import` does not find, Python then calls this method too,
            # and shows our message.
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if frames.asked_by_find_spec():
            return None
        # Without name=: with it, Python replaces the message.
        raise ModuleNotFoundError(missing(fullname))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AliasModule(spec.name, f"{spec.name}, provided by hasten.")

    def exec_module(self, module: ModuleType) -> None:
        """Apply the environment and Lightning's conventions; names are imported when they are used."""
        use(LIGHTNING)
        place = relative(module.__name__) or ""
        if "." not in place:
            # Programs look for the folder of a package.
            module.__file__ = str(Path(__file__).with_name("__init__.py"))
        if place == "pytorch":
            from hasten_lightning.utilities.warnings import disable_if_requested

            disable_if_requested()

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context is None or context.name is None else context.name.lower()
        for name in _DISTRIBUTIONS:
            if wanted is None or re.sub(r"[-_.]+", "-", wanted) == name:
                yield _Distribution(name)


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a package of Lightning while hasten provides it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSION}\nSummary: hasten, under this name.\n"
        if filename == "top_level.txt":
            return f"{self._name.replace('-', '_')}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._name} is hasten, under this name: it has no files")

    @property
    def files(self) -> Any:
        return None


class _Products(importlib.abc.MetaPathFinder):
    """The last finder: for packages of hosted products that are not installed, it says what to use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in PRODUCTS and not frames.asked_by_find_spec():
            what = f"{fullname} is the client of a hosted product, and is not installed."
            raise make_error(ModuleNotFoundError, what, fix=PRODUCTS[fullname])
        return None


FINDER = _Finder()
PRODUCTS_FINDER = _Products()


def all_modules(names: Iterable[str] = ROOTS) -> Iterator[str]:
    """Yield every module that can be imported under the given packages."""
    for root in names:
        for place in TABLE:
            if f"{place}.".startswith(ROOTS[root]):
                yield f"{root}.{place.removeprefix(ROOTS[root]).removeprefix('.')}".rstrip(".")
