"""Methods of the user that cannot take what they will be called with, told before anything starts."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_warn
from hasten.hooks import overrides
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import DataHooks, LightningDataModule
from hasten.module.hook_defaults import ModelHooks

# The steps, and the other methods whose base takes anything: (least, most) of what they are called with.
_STEPS = {
    "training_step": ("batch", "batch_idx"),
    "validation_step": ("batch", "batch_idx", "dataloader_idx"),
    "test_step": ("batch", "batch_idx", "dataloader_idx"),
    "predict_step": ("batch", "batch_idx", "dataloader_idx"),
}
_MODULE_METHODS = (
    "configure_optimizers", "configure_callbacks", "configure_model", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping",
)  # fmt: skip


# How alike two names are for one to be a slip of the other: a letter or two of twenty.
_ALIKE = 0.9

# Hooks of older versions of the field that others took the place of.
_OLD_HOOKS = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
}

# Files that are not the program's: Python's and this library's by their folder, packages by the name of theirs.
_NOT_OURS = tuple(
    os.path.join(folder, "")
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1])
)


def check_signatures(
    module: LightningModule, datamodule: LightningDataModule | None, callbacks: Iterable[Callback]
) -> None:
    """Check every hook and step that is overridden.

    Raises:
        MisconfigurationException: a method takes too few or too many arguments, or is a misspelt hook; the message has
            the line to write.

    """
    for owner, base, names in (
        (module, LightningModule, [*_names(ModelHooks), *_names(DataHooks), *_MODULE_METHODS]),
        (datamodule, LightningDataModule, _names(DataHooks)),
        *((callback, Callback, _names(Callback)) for callback in callbacks),
    ):
        if owner is None:
            continue
        # A class of hasten's own is right; what a program has put on its instance may not be.
        ours = type(owner).__module__.startswith("hasten.")
        for name in [name for name in names if name in vars(owner)] if ours else names:
            if overrides(owner, base, name):
                _check(owner, name, _arguments(base, name))
        if not ours:
            _check_spelling(owner, base, [*names, *_STEPS] if base is LightningModule else names)
    for name, arguments in _STEPS.items():
        if overrides(module, LightningModule, name):
            _check_step(module, name, arguments)


def _check_spelling(owner: object, base: type, hooks: list[str]) -> None:
    """Refuse a method that can only be a misspelt hook, and warn of one that looks like a hook or once was one.

    Raises:
        MisconfigurationException: the name is one letter off that of a hook which is not there, the arguments are the
            hook's, and nothing in the files of the program calls it.

    """
    kind = type(owner)
    for name in dir(kind):
        if name.startswith("_") or hasattr(base, name):
            continue
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method):
            continue
        if name in _OLD_HOOKS:
            _warn_of_old_hook(kind, base, name)
            continue
        if name.rstrip("_0123456789") in hooks:
            continue  # Hooks are switched off by such names.
        close = get_close_matches(name, hooks, n=1, cutoff=_ALIKE)
        # Beside the hook itself it is a helper of its own.
        if not close or overrides(owner, base, close[0]):
            continue
        hook = close[0]
        if (
            _is_one_letter_off(name, hook)
            and _has_arguments_of(method, base, hook)
            and _is_unused(kind, base, name)
        ):
            raise MisconfigurationException(
                f"{kind.__name__}.{name}() would never be called: the hook is {hook}(). Rename it to {hook}; "
                "if it is a method for your own code, give it a name less alike."
            )
        rank_zero_warn(
            f"{kind.__name__}.{name}() looks like the hook {hook}() misspelt, and the trainer does not call it. "
            f"Rename it to {hook}; if it is a method for your own code, give it a name less alike."
        )


def _warn_of_old_hook(kind: type, base: type, name: str) -> None:
    """Warn of a hook of older versions of the field, where nothing else calls it."""
    arguments = {LightningModule: (), Callback: ("trainer", "pl_module")}.get(base)
    if arguments is None or not _accepts(getattr(kind, name), ("self", *arguments)):
        return  # A method for another use: callbacks of other libraries have such names.
    if _is_unused(kind, base, name):
        new = _OLD_HOOKS[name]
        rank_zero_warn(
            f"{kind.__name__}.{name}() was a hook of older versions of Lightning, and is not called any more. "
            f"Rename it to {new}, with the arguments ({', '.join(_arguments_of(base, new))})."
        )


def _arguments_of(base: type, hook: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(base, hook)).parameters)


def _is_one_letter_off(name: str, hook: str) -> bool:
    """Return whether one letter too many, too few, or another one makes the difference, or two that changed places."""
    longer, shorter = sorted((name, hook), key=len, reverse=True)
    at = next((i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), len(shorter))
    if len(longer) == len(shorter):
        swapped = longer[:at] + longer[at : at + 2][::-1] + longer[at + 2 :]
        return longer[at + 1 :] == shorter[at + 1 :] or swapped == shorter
    return len(longer) == len(shorter) + 1 and longer[at + 1 :] == shorter[at:]


def _has_arguments_of(method: Any, base: type, hook: str) -> bool:
    given = tuple(inspect.signature(method).parameters)[1:]
    if hook in _STEPS:
        return 0 < len(given) <= len(_STEPS[hook]) and given[0] == "batch"
    taken = tuple(inspect.signature(getattr(base, hook)).parameters)[1:]
    # Nothing but a hook begins with "on_" and takes what the hook is given.
    return given == taken or (hook.startswith("on_") and _accepts(method, ("self", *taken)))


def _is_unused(kind: type, base: type, name: str) -> bool:
    """Return whether no file of the program mentions the method, beside where it is defined."""
    files = set()
    for one in kind.__mro__:
        if issubclass(base, one) or one.__module__.startswith(("hasten.", "builtins")):
            continue
        if name in vars(one) and not issubclass(one, base):
            return False  # A class for other uses as well.
        try:
            path = inspect.getsourcefile(one)
        except (OSError, TypeError):
            path = None
        if path is None or (name in vars(one) and _is_installed(path)):
            return False  # Typed in somewhere, or of a package, where nobody can rename it.
        files.add(path)
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    python = (path for path in loaded if path and path.endswith(".py") and os.path.isfile(path))
    files.update(path for path in python if not _is_installed(path))
    return not any(_mentions(path, name) for path in files)


def _is_installed(path: str) -> bool:
    return path.startswith(_NOT_OURS) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _mentions(path: str, name: str) -> bool:
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Most files do not have the word, and need no parsing.
        nodes = ast.walk(ast.parse(text)) if name in text else ()
    except (OSError, SyntaxError, ValueError):
        return True  # It cannot be seen.
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name)
        or (isinstance(node, ast.Name) and node.id == name)
        or (
            isinstance(node, ast.Call)
            and any(isinstance(word, ast.Constant) and word.value == name for word in node.args)
        )
        for node in nodes
    )


def check_takes_loader(module: LightningModule, stage: str, loaders: int) -> None:
    """Check that the step and batch hooks of a stage take ``dataloader_idx`` where there are several loaders.

    Args:
        module: the module.
        stage: "validation" or "test".
        loaders: how many loaders there are.

    Raises:
        MisconfigurationException: one of them does not.

    """
    if loaders < 2:
        return
    for name, arguments in (
        (f"{stage}_step", ("batch", "batch_idx", "dataloader_idx")),
        (f"on_{stage}_batch_start", ("batch", "batch_idx", "dataloader_idx")),
        (f"on_{stage}_batch_end", ("outputs", "batch", "batch_idx", "dataloader_idx")),
    ):
        if overrides(module, LightningModule, name) and not _accepts(getattr(module, name), arguments):
            raise MisconfigurationException(
                f"{type(module).__name__}.{name}() does not take `dataloader_idx`, and there are {loaders} "
                f"{stage} loaders. Write: def {name}(self, {', '.join(arguments[:-1])}, dataloader_idx=0)."
            )


@functools.cache
def _names(base: type) -> list[str]:
    kept = ("on_", "setup", "teardown", "prepare_data", "transfer_", "state_dict", "load_state_dict")
    return [
        name
        for name, value in vars(base).items()
        if inspect.isfunction(value) and (name.startswith(kept) or name.endswith("_dataloader"))
    ]


@functools.cache
def _arguments(base: type, name: str) -> tuple[str, ...]:
    """Return the arguments that are always given: those without a default in the base."""
    parameters = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.default is p.empty or p.name == "optimizer_closure")


def _accepts(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # written in C: nothing is known
    return True


def _check(owner: object, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(owner, name)
    if not callable(method):
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name} is a {type(method).__name__}; it must be a method. "
            "Rename what you keep there."
        )
    if not _accepts(method, arguments):
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name}{inspect.signature(method)} cannot be called: it is given "
            f"({', '.join(arguments)}). Write: def {name}({', '.join(('self', *arguments))})."
        )


def _check_step(module: LightningModule, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(module, name)
    # "validation_step" and its like are given dataloader_idx only where there are several loaders.
    if any(_accepts(method, arguments[:count]) for count in range(1, len(arguments) + 1)):
        return
    try:
        signature = str(inspect.signature(method))
    except (TypeError, ValueError):
        return
    several = (
        " Several optimizers need manual optimisation (self.automatic_optimization = False), not an optimizer_idx."
        if "optimizer_idx" in signature
        else ""
    )
    raise MisconfigurationException(
        f"{type(module).__name__}.{name}{signature} cannot be called: it is given (batch, batch_idx). "
        f"Write: def {name}(self, batch, batch_idx).{several}"
    )
