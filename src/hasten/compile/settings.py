"""Check the argument ``compile``: which parts of a model are compiled, and with which options."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hasten._lib import check, torch_private
from hasten._lib.device import is_cuda, is_host
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean, unknown_word

_Model = TypeVar("_Model")

# Options of hasten, and options of torch.compile that the run does not decide.
_OWN = ("regional", "step", "cache")
_KEYS = ("mode", "options", "backend", "dynamic", *_OWN)


@dataclass(frozen=True)
class CompileSettings:
    """How a model is compiled."""

    regional: bool = False  # Compile the repeated blocks of the model once, and nothing else.
    step: bool = False  # Compile backward, clipping and the optimizer's step together with ``training_step``.
    cache: bool = True  # Keep compiled code for the next run of the program.
    options: Mapping[str, Any] = field(default_factory=dict)  # For ``torch.compile``.
    # From the user's own ``torch.compile(model)``; used instead of ``options``.
    context: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    context_records: bool = False  # Whether ``context`` records CUDA graphs.
    on_host: bool = False  # Whether the model is on the CPU.

    @property
    def backend(self) -> Any:
        """The backend of the compiler: a name, or the user's function."""
        return self.options.get("backend") or "inductor"

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps are recorded and replayed as CUDA graphs."""
        if self.context is not None:
            return self.context_records
        if self.backend == "cudagraphs":
            return True
        if self.backend != "inductor":
            return False
        inner = self.options.get("options") or {}
        by_mode = self.options.get("mode") in ("reduce-overhead", "max-autotune")
        return bool(inner.get("triton.cudagraphs", by_mode))

    @property
    def one_size(self) -> bool:
        """Whether a graph is valid for one batch size only: it is recorded, or ``dynamic`` is False."""
        return self.cuda_graphs or self.options.get("dynamic") is False

    def dynamic_dims(self, dims: int) -> range:
        """Return the dimensions of a batch to mark as changing from batch to batch.

        Example::

            >>> CompileSettings().dynamic_dims(2)
            range(0, 2)
            >>> CompileSettings(options={"mode": "reduce-overhead"}).dynamic_dims(2)
            range(1, 2)

        """
        if self.options.get("dynamic") is False:
            return range(0)
        # Each of the few widths is compiled and recorded once; an odd batch at the end is not worth a recording.
        return range(1 if self.cuda_graphs else 0, dims)

    @property
    def recipe(self) -> str:
        """Everything that decides the compiled code, as text."""
        options = {name: value for name, value in self.options.items() if name != "backend"}
        return f"regional={self.regional} step={self.step} backend={self.backend} {sorted(options.items(), key=str)}"

    def compile(self, function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        """Return ``function``, compiled when it is first called; if ``whole``, it has to be one graph."""
        if self.context is not None:
            return self.context(function)
        options = dict(self.options)
        if self.on_host and self.backend == "inductor":
            from hasten.compile.fixed_order import with_fixed_order  # Operations of torch, not made for each start.

            options = with_fixed_order(options)
        return torch.compile(function, fullgraph=whole, **options)


def as_compile(owner: str, value: object) -> CompileSettings | None:
    """Return the settings for ``compile=value``; None for no compilation.

    The value is None or False, True, "regional", "step", or a dict of options of ``torch.compile``, which may also hold
    ``"regional"``, ``"step"`` and ``"cache"`` (True or False). Messages begin with ``owner``.

    Example::

        >>> as_compile("Trainer", {"mode": "reduce-overhead"}).cuda_graphs
        True
        >>> as_compile("Trainer", False) is None
        True

    """
    if value is None or value is False:
        return None
    if isinstance(value, CompileSettings):
        return value
    if value is True or (isinstance(value, str) and value in ("regional", "step")):
        return _checked(owner, CompileSettings(regional=value == "regional", step=value == "step"))
    if isinstance(value, Mapping):
        return _checked(owner, _from_options(owner, dict(value)))
    if isinstance(value, str) and value in torch_private.compile_modes():
        what = f"{owner}(compile={value!r}): that is a mode of torch.compile."
        raise make_error(ValueError, what, fix=f"Write compile={{'mode': {value!r}}}.", argument="compile")
    allowed = "True, False, 'regional', 'step', or a dict of torch.compile's options"
    if isinstance(value, str):
        raise check.wrong(owner, "compile", value, allowed, hint=did_you_mean(value, ("regional", "step", "True")))
    raise check.wrong_type(owner, "compile", value, allowed, error=TypeError)


def _checked(owner: str, settings: CompileSettings) -> CompileSettings:
    """Return settings for whole steps if ``owner`` and this torch have them; others unchanged."""
    if not settings.step:
        return settings
    if owner == "Fabric":
        why, fix = "your loop has the steps, not Fabric.", "Use compile=True."
    elif settings.regional:
        why, fix = "repeated blocks are compiled instead of steps.", "Use 'step' or 'regional'."
    elif torch_private.gradients_in_graphs() is None:
        why, fix = f"torch {torch.__version__} cannot trace torch.autograd.grad.", "Use compile=True."
    else:
        return settings
    raise make_error(ValueError, f"{owner}(compile='step'): {why}", fix=fix, argument="compile")


def _from_options(owner: str, given: dict[str, Any]) -> CompileSettings:
    for name in given:
        if name not in _KEYS:
            keys = ", ".join(map(repr, _KEYS))
            what, fix = unknown_word(f"{owner}(compile={{{name!r}: ...}})", name, _KEYS, f"use one of {keys}.")
            raise make_error(ValueError, what, fix=fix, argument="compile")
    own = {name: check.boolean(owner, f"compile[{name!r}]", given.pop(name)) for name in _OWN if name in given}
    mode, inner, backend = given.get("mode"), given.get("options"), given.get("backend")
    check.boolean(owner, "compile['dynamic']", given.get("dynamic"), allow_none=True)
    check.one_of(owner, "compile['mode']", mode, torch_private.compile_modes(), allow_none=True)
    check.instance(owner, "compile['options']", inner, Mapping, "a dict of the backend's options", allow_none=True)
    if mode is not None and inner:
        raise make_error(
            ValueError,
            f"{owner}(compile={{'mode': {mode!r}, 'options': ...}}): torch.compile takes one of the two. A mode is a "
            "set of options: torch._inductor.list_mode_options() shows them.",
            argument="compile",
        )
    if not callable(backend):
        known = torch.compiler.list_backends(exclude_tags=())
        check.one_of(owner, "compile['backend']", backend, known, allow_none=True)
    for name in inner or () if backend in (None, "inductor") else ():
        if str(name).replace("-", "_") not in torch_private.compile_options():
            hint = did_you_mean(str(name), torch_private.compile_options())
            allowed = "the options that torch._inductor.list_options() lists"
            raise check.wrong(owner, "compile['options'] option", name, allowed, hint=hint)
    if inner and backend in (None, "inductor"):
        try:
            torch.compile(lambda: None, options=dict(inner))
        except RuntimeError as error:
            what = f"{owner}(compile={{'options': {dict(inner)!r}}}): {error}."
            raise make_error(TypeError, what, fix="Give the option a value of its type.", argument="compile") from None
    return CompileSettings(options=given, **own)


def check_possible(owner: str, settings: CompileSettings, device: torch.device) -> None:
    """Check that the settings work on this machine.

    Example::

        >>> check_possible("Trainer", CompileSettings(options={"mode": "reduce-overhead"}), torch.device("cpu"))
        Traceback (most recent call last):
        ...
        ValueError: Trainer(compile={'mode': 'reduce-overhead'}) records CUDA graphs, which need a CUDA device; ...

    """
    try:
        torch_private.check_compiler_supported()
    except RuntimeError as error:
        raise make_error(
            ValueError,
            f"{owner}(compile=...): torch {torch.__version__} cannot compile under Python {sys.version.split()[0]}: "
            f"{error} Leave compile out.",
            argument="compile",
        ) from None
    # With the user's own torch.compile, torch decides, and records nothing here.
    if settings.cuda_graphs and not is_cuda(device) and settings.context is None:
        options = {name: settings.options[name] for name in ("mode", "options", "backend") if name in settings.options}
        nearest = {"mode": "max-autotune-no-cudagraphs"} if options.get("mode") == "max-autotune" else True
        raise make_error(
            ValueError,
            f"{owner}(compile={options}) records CUDA graphs, which need a CUDA device; this run is on "
            f"{device.type!r}.",
            fix=f"Use compile={nearest}, which compiles for this device.",
            argument="compile",
        )
    if settings.backend == "inductor" and settings.context is None and is_host(device):
        _check_compiler(owner)


def _check_compiler(owner: str) -> None:
    try:
        found = shutil.which(torch_private.cpp_compiler()) is not None
    except Exception:  # torch raises several kinds, one of them its own.
        found = False
    if not found:
        what = f"{owner}(compile=...): no C++ compiler is on PATH, and torch.compile needs one on the CPU."
        fix = "Install one (apt install g++), name it in the environment variable CXX, or leave compile out."
        raise make_error(ValueError, what, fix=fix, argument="compile")


# -- models that the user passed through torch.compile

_BY_USER = "_hasten_compiled_by_user"


def inner_model(model: _Model) -> _Model:
    """Return the model inside of ``torch.compile(model)`` and remember its options; other objects unchanged."""
    if not isinstance(model, nn.Module):
        return model
    inner = torch_private.inside_compiled(model)
    if inner is not None:
        inner.__dict__[_BY_USER] = _UserOptions(getattr(model, "dynamo_ctx", None))
        # The result of torch.compile has the attributes and the call of the model.
        return cast(_Model, inner)
    model.__dict__.pop(_BY_USER, None)
    return model


def users_settings(model: nn.Module) -> CompileSettings | None:
    """Return how the user compiled ``model``; None if it was not compiled."""
    options = model.__dict__.get(_BY_USER)
    if options is None or options.context is None:
        return None
    # Options of inductor; other backends have none of this name.
    config = getattr(options.context, "compiler_config", None)
    records = isinstance(config, dict) and bool(config.get("triton.cudagraphs")) and torch.cuda.is_available()
    return CompileSettings(context=options.context, context_records=records, cache=False)


class _UserOptions:
    """The options of the user's torch.compile; a copy of the model is not compiled."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __reduce__(self) -> Any:
        return _UserOptions, (None,)
