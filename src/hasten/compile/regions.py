"""Which parts of a model are compiled, and how they are called: in place, with nothing to see from outside."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.hooks import RemovableHandle

from hasten._lib.rank_zero import warn_once
from hasten.compile.cuda_graphs import kept_outputs
from hasten.compile.report import FROZEN, Watch, brief
from hasten.compile.settings import CompileSettings


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of ``function`` that the compiler takes for another one: with graphs and limits of its own."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor in ``data``; None if there is none."""
    if isinstance(data, Tensor):
        return data.shape[0] if data.dim() else None
    if isinstance(data, dict) or hasattr(data, "values"):
        data = data.values()
    elif not isinstance(data, (list, tuple)):
        return None
    for item in data:
        size = batch_size(item)
        if size is not None:
            return size
    return None


def mark_dynamic(data: Any, dims: range) -> None:
    """Tell the compiler that these dimensions of each tensor may change from batch to batch."""
    # Softly: where a model fixes a size, the compiler does too, without complaint.
    if isinstance(data, Tensor):
        for dim in dims:
            if dim < data.dim() and data.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(data, dim)
    elif isinstance(data, dict) or hasattr(data, "values"):
        for item in data.values():
            mark_dynamic(item, dims)
    elif isinstance(data, (list, tuple)):
        for item in data:
            mark_dynamic(item, dims)


def must_stay_python() -> bool:
    """Return whether somebody looks at each operation just now (counting them, tracing an export)."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


class Hooks:
    """The hooks on a module and its parts, followed: a graph is for those it was made with.

    The compiler does not ask again which hooks there are, so a graph would pass by one that was added later, and go
    on with one that was removed. Torch counts the hooks that are added, so where there are none one comparison says
    that there are still none.

    Args:
        module: the module.

    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # How many hooks the program had added when these were looked at.
        self.added = -1
        self.there: tuple[int, ...] = ()

    def look(self) -> None:
        """Find the hooks that are there now; their numbers are of the whole program."""
        self.added = RemovableHandle.next_id
        found = [number for table in _global_hooks() for number in table]
        for part in self._module.modules():
            own = part.__dict__
            for name in _HOOKS:
                if table := own.get(name):
                    found += table
        self.there = tuple(found)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# For how many sets of hooks graphs are made; with more, the module computes in Python while it has any.
SETS_OF_HOOKS = 4


def _global_hooks() -> Iterator[dict[int, Any]]:
    for name in _HOOKS:
        yield getattr(nn.modules.module, f"_global{name}", {})


class Region:
    """The compiled call of one module, or of several alike: training and evaluation apart.

    Args:
        name: of the part, for reports.
        settings: how it is compiled.
        watch: told what happens.
        dims: how many leading dimensions of its inputs may change from call to call.

    """

    def __init__(self, name: str, settings: CompileSettings, watch: Watch, dims: int) -> None:
        self.name = name
        self._settings = settings
        self._watch = watch
        self._dims = settings.dynamic_dims(dims)
        self._phases: dict[tuple[bool, bool, tuple[int, ...]], tuple[Callable[..., Any], int | None]] = {}
        self._sets_of_hooks: set[tuple[int, ...]] = set()
        self.failed = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Hooks) -> Any:
        """Call ``module``, which has these hooks, compiled."""
        if self.failed or self._watch.paused or must_stay_python():
            return module._call_impl(*args, **kwargs)
        # Apart, so that what one phase fixes (dropout, statistics, gradients) never undoes the other's graph.
        if hooks.added != RemovableHandle.next_id or hooks.there:
            hooks.look()
        phase = (module.training, torch.is_grad_enabled(), hooks.there)
        made = self._phases.get(phase)
        size = batch_size(args) if args else batch_size(kwargs)
        if made is None:
            self._sets_of_hooks.add(hooks.there)
            if hooks.there and len(self._sets_of_hooks) > SETS_OF_HOOKS:
                with self._watch.pause():
                    return module._call_impl(*args, **kwargs)
            made = self._phases[phase] = (self._settings.compile(own_code(_call, self.name)), size)
        compiled, first_size = made
        if size != first_size and (size == 1 or self._settings.one_size):
            # The compiler treats 1 unlike all other sizes, and a recorded graph has one batch size only: the odd batch
            # at the end is not worth another graph, nor are its parts.
            with self._watch.pause():
                return module._call_impl(*args, **kwargs)
        if self._dims:
            mark_dynamic((args, kwargs), self._dims)
        before = self._watch.graphs()
        try:
            output = compiled(module, *args, **kwargs)
        except TorchDynamoException as error:
            failure = error
        else:
            if self._watch.graphs() != before:
                self._watch.made(self.name)
                tell_recompiles(self._watch)
            elif self._watch.unsaid:
                self._watch.say()
            return kept_outputs(output, all_of_them=not phase[1]) if self._settings.cuda_graphs else output
        # Outside of the handler: an error of the model's own comes up here in its own words, at its own place.
        output = module._call_impl(*args, **kwargs)
        self.failed = True
        reason = f"{type(failure).__name__}: {brief(str(failure))}"
        self._watch.leave(self.name, reason)
        warn_once(
            f"compile {self.name} {reason}",
            f"compile: {self.name} could not be compiled and stays Python. {reason} Change that part, or leave it "
            "out of the graph with @torch.compiler.disable.",
        )
        return output


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


# Of how many recompiles a program is warned; all are in the report.
_TOLD = 3


def tell_recompiles(watch: Watch) -> None:
    """Warn of graphs made again that could be avoided: of the first few causes."""
    for reason in watch.new_recompiles():
        if reason.endswith(FROZEN):
            continue
        watch.told += 1
        if watch.told <= _TOLD:
            warn_once(f"recompile {reason}", f"compile: a graph was made again. {reason} {_advice(reason)}")


def _advice(reason: str) -> str:
    if "size mismatch" in reason or "stride mismatch" in reason or "dynamic" in reason:
        return (
            "Inputs of a new shape came: pad to few widths (batching='length', or a collate function that pads to "
            "multiples), or pass compile={'dynamic': True}."
        )
    if "==" in reason or "dict" in reason or "len(" in reason:
        return (
            "A Python value that the graph was made for has changed: keep counters and settings that change out of "
            "forward and of the step, or make them tensors."
        )
    return "Keep what differs out of forward and of the step."


class _InPlace:
    """What stands in ``module._compiled_call_impl``: torch calls it in place of the module's own call."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module = module
        self._region = region
        self._hooks = Hooks(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._region(self._module, args, kwargs, self._hooks)


class Place:
    """The compiled parts of one model: switched on and off in place.

    Classes, names of parameters, hooks and ``state_dict`` stay as they are; a copy of the model is not compiled.

    Args:
        module: the model.
        settings: how it is compiled.
        watch: told what happens.
        dims: how many leading dimensions of the inputs may change from call to call.
        packed: the blocks compute rows of real tokens, whose attention depends on the data.

    Raises:
        ValueError: no part of the blocks of a packed model can be compiled.

    """

    def __init__(
        self, module: nn.Module, settings: CompileSettings, watch: Watch, dims: int = 1, packed: bool = False
    ) -> None:
        self._calls: list[tuple[nn.Module, _InPlace]] = []
        blocks = list(repeated_blocks(module)) if settings.regional or packed else []
        if packed:
            blocks = _beside_attention(blocks)
            if not blocks:
                raise ValueError(
                    f"Trainer(compile=..., packed=True): the blocks of {type(module).__name__} have no part beside "
                    "attention that could be compiled, and attention over packed rows depends on the data. Leave "
                    "compile out, or use batching='length' in place of packed."
                )
        self.blocks = len(blocks)
        if blocks:
            for name, group in blocks:
                region = Region(name, settings, watch, dims)
                self._calls += [(block, _InPlace(block, region)) for block in group]
            return
        owner = type(module).__name__
        parts = [(owner, module), *((f"{owner}.{name}", part) for name, part in _parts(module))]
        self._calls = [(part, _InPlace(part, Region(name, settings, watch, dims))) for name, part in parts]

    def on(self) -> None:
        """Have the parts called compiled."""
        for module, call in self._calls:
            # One that the user compiled stays the user's.
            if module._compiled_call_impl is None:
                module._compiled_call_impl = call

    def off(self) -> None:
        """Have the parts called as they are."""
        for module, call in self._calls:
            if module.__dict__.get("_compiled_call_impl") is call:
                del module.__dict__["_compiled_call_impl"]


def _beside_attention(groups: list[tuple[str, list[nn.Module]]]) -> list[tuple[str, list[nn.Module]]]:
    """Return the largest parts of blocks that hold no attention, alike ones together."""
    found: dict[Any, tuple[str, list[nn.Module]]] = {}

    def look(part: nn.Module) -> None:
        if not any(True for _ in part.children()):
            return  # One layer is too small a graph.
        if any("attention" in type(inner).__name__.lower() for inner in part.modules()):
            for child in part.children():
                look(child)
            return
        if not any(True for _ in part.parameters()):
            return
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in part.named_parameters())
        found.setdefault((type(part), shapes), (type(part).__name__, []))[1].append(part)

    for _, group in groups:
        for block in group:
            for child in block.children():
                look(child)
    return list(found.values())


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts that are called by themselves when a step does not call the whole."""
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def repeated_blocks(module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield (name, blocks) for each group of alike children of a list, the outermost only.

    Args:
        module: the model.

    Example::

        >>> layers = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(3)]
        >>> [(name, len(blocks)) for name, blocks in repeated_blocks(nn.Sequential(*layers))]
        [('TransformerEncoderLayer', 3)]

    """
    alike: dict[Any, list[nn.Module]] = {}
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        for child in module.children():
            # A single layer is too small a graph to gain anything.
            if any(True for _ in child.children()):
                shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in child.named_parameters())
                alike.setdefault((type(child), shapes), []).append(child)
    found = {id(block) for group in alike.values() if len(group) > 1 for block in group}
    for (kind, _), group in alike.items():
        if len(group) > 1:
            yield kind.__name__, group
    for child in module.children():
        if id(child) not in found:
            yield from repeated_blocks(child)
