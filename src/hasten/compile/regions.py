"""Functions as graphs, and the parts of a model that are compiled in place."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import warn_once
from hasten._lib.tree import leaves, sharded_parameter
from hasten.compile.cuda_graphs import kept_outputs
from hasten.compile.report import FROZEN, CompileCounters, brief, remedy_of
from hasten.compile.settings import CompileSettings


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of ``function`` that the compiler treats as another function, with separate graphs and limits."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def batch_size(data: object) -> int | None:
    """Return the first dimension of the first tensor in ``data``; None if there is none."""
    return next((leaf.shape[0] for leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.dim()), None)


def _mark_dynamic(data: object, dims: range) -> None:
    """Mark these dimensions of each tensor as ones that may change from batch to batch."""
    for leaf in leaves(data):
        for dim in dims if isinstance(leaf, Tensor) else ():
            # Where a model fixes a size, "maybe" lets the compiler fix it too, without an error.
            if dim < leaf.dim() and leaf.shape[dim] > 1:
                torch_private.mark_dynamic(leaf, dim)


def must_stay_python() -> bool:
    """Return whether every operation is observed at the moment, for example to count it or to trace an export."""
    return torch.compiler.is_compiling() or torch_private.is_observed()


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Graphs are made for this many sets of hooks; with more, the module computes in Python while it has any.
MAX_HOOK_SETS = 4


class InstalledHooks:
    """The hooks on a module and its parts; a graph is valid only for the hooks it was made with.

    The compiler does not guard on hooks: a graph would skip a hook that was added later and keep calling one that was
    removed. Torch numbers the hooks that a program adds, so while a module has none, one comparison shows that it
    still has none.

    ``inside`` leaves out the hooks on the module itself, which are called outside of its forward.
    """

    def __init__(self, module: nn.Module, *, inside: bool = False) -> None:
        self._module = module
        self._inside = inside
        self._next_id = -1
        self.ids: tuple[int, ...] = ()

    def current(self) -> tuple[int, ...]:
        """Return the numbers of the hooks that are installed now."""
        if self._next_id == RemovableHandle.next_id and not self.ids:
            return self.ids
        self._next_id = RemovableHandle.next_id
        found: list[int] = []
        for name in _HOOK_TABLES:
            found += getattr(nn.modules.module, f"_global{name}", ())
        for part in self._module.modules():
            if self._inside and part is self._module:
                continue
            for name in _HOOK_TABLES:
                found += part.__dict__.get(name) or ()
        self.ids = tuple(found)
        return self.ids


@dataclass
class Graph:
    """A compiled function, the batch size of its first call, and how often it was compiled."""

    call: Callable[..., Any]
    size: int | None
    compiled: int = 0


class Compiled(ABC):
    """A function compiled to one graph for each phase and set of hooks; ``dims`` as for ``CompiledModel``."""

    def __init__(self, name: str, settings: CompileSettings, counters: CompileCounters, dims: int) -> None:
        self.name = name
        self._settings = settings
        self._counters = counters
        self._dims = settings.dynamic_dims(dims)
        self._graphs: dict[Any, Graph] = {}
        self._hook_sets: set[tuple[int, ...]] = set()
        self._stays_python = False
        # The last cause for which a graph was made again.
        self._recompile = ""

    @abstractmethod
    def _compile(self) -> Callable[..., Any]:
        """Return the compiled function."""

    def _run(
        self,
        phase: object,
        hooks: InstalledHooks,
        data: object,
        call: Callable[[Callable[..., Any]], Any],
        python: Callable[[], Any],
    ) -> tuple[Any, Graph | None]:
        """Return the output of a call, and its graph; None if ``python`` computed it."""
        counters = self._counters
        graph = self._graph(phase, hooks, data)
        if graph is None:
            with counters.pause():
                return python(), None
        before = counters.graphs_in_process()
        try:
            output = call(graph.call)
        except Exception as error:
            ran = counters.graphs_in_process() != before or graph.compiled
            if isinstance(error, torch.OutOfMemoryError) or (ran and not torch_private.is_error_of_compiler(error)):
                raise
            reason = self._why(error)
        else:
            return self._done(graph, output, before), graph
        self._leave_to_python(reason)
        # Outside of the handler, so that an error of the function itself is raised with its own text and place.
        output = python()
        self._failed(reason)
        return output, None

    def _why(self, error: Exception) -> str:
        """Return why the function could not be compiled."""
        return f"{type(error).__name__}: {brief(str(error))}"

    @abstractmethod
    def _failed(self, reason: str) -> None:
        """React to a function that could not be compiled and has been computed in Python."""

    def _graph(self, phase: object, hooks: InstalledHooks, data: object) -> Graph | None:
        """Return the graph for a call, made if it is the first; None if this call is not worth another graph."""
        installed, size = hooks.current(), batch_size(data)
        graph = self._graphs.get((phase, installed))
        if graph is None:
            self._hook_sets.add(installed)
            if installed and len(self._hook_sets) > MAX_HOOK_SETS:
                return None
            graph = self._graphs[phase, installed] = Graph(self._compile(), size)
        elif size != graph.size and (size == 1 or self._settings.one_size):
            # The compiler treats size 1 unlike all others, and a recorded graph has one batch size: the odd batch at
            # the end of an epoch is not worth another graph, nor are its parts.
            return None
        if self._dims:
            _mark_dynamic(data, self._dims)
        return graph

    def _done(self, graph: Graph, output: Any, graphs_before: int) -> Any:
        """Count what was compiled in a call, and return its output."""
        counters = self._counters
        if counters.graphs_in_process() != graphs_before:
            graph.compiled += 1
            counters.add_compiled(self.name)
            self._warn_of_recompiles()
        elif counters.unprinted:
            counters.print_report()
        if not self._settings.cuda_graphs:
            return output
        return kept_outputs(output, all_of_them=not torch.is_grad_enabled())

    def _warn_of_recompiles(self) -> None:
        """Warn once of a recompile that could be avoided; the report lists them all."""
        for reason in self._counters.new_recompiles():
            if not reason.endswith(FROZEN):
                self._recompile = reason
                what = f"compile: a graph was made again. {reason}"
                fix = f"{remedy_of(reason)} All causes: trainer.compile_report.recompiles"
                warn_once(f"recompile {self.name}", what, fix=fix)

    def _leave_to_python(self, reason: str) -> None:
        self._stays_python = True
        self._graphs.clear()
        self._counters.add_python(self.name, reason)


class Region(Compiled):
    """The compiled call of modules with the same structure: one graph to train and one to evaluate.

    ``forward_only`` compiles ``forward`` without the hooks around it, which gather sharded parameters; see
    ``Compiled``.
    """

    def __init__(self, *compiled: Any, forward_only: bool = False) -> None:
        super().__init__(*compiled)
        self.forward_only = forward_only
        self._function = _forward if forward_only else torch_private.call_uncompiled

    def _compile(self) -> Callable[..., Any]:
        return self._settings.compile(own_code(self._function, self.name))

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], hooks: InstalledHooks
    ) -> object:
        """Call ``module``, which has these hooks, compiled."""
        if self._stays_python or self._counters.paused or must_stay_python():
            return self._function(module, *args, **kwargs)
        # Separate graphs, so that what one phase fixes (dropout, statistics, gradients) never invalidates the other's
        # graph.
        phase = module.training, torch.is_grad_enabled()
        output, _ = self._run(
            phase,
            hooks,
            (args, kwargs),
            lambda compiled: compiled(module, *args, **kwargs),
            lambda: self._function(module, *args, **kwargs),
        )
        return output

    def _failed(self, reason: str) -> None:
        what = f"compile: {self.name} could not be compiled and stays Python. {reason}"
        fix = "Change that part, or leave it out of the graph with @torch.compiler.disable."
        warn_once(f"compile {self.name} {reason}", what, fix=fix)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = module.__dict__.get(_OWN_FORWARD)
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


# The forward that an object had in its own dictionary.
_OWN_FORWARD = "_own_forward"


class CompiledParts:
    """The compiled parts of one model, enabled and disabled in place.

    Classes, names of parameters, hooks and ``state_dict`` do not change; a copy of the model is not compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: CompileSettings,
        counters: CompileCounters,
        dims: int = 1,
        packed: bool = False,
    ) -> None:
        groups = list(alike_blocks(module)) if settings.regional or packed else []
        if packed:
            groups = _beside_attention(groups)
            if not groups:
                raise make_error(
                    ValueError,
                    f"Trainer(compile=..., packed=True): {type(module).__name__} has no part outside attention to "
                    "compile.",
                    fix="Leave compile out, or use batching='length' instead of packed.",
                    argument="compile",
                )
        self.blocks = len(groups)
        if not groups:
            owner = type(module).__name__
            groups = [(owner, [module]), *((f"{owner}.{name}", [part]) for name, part in _parts(module))]
        # Module, where the compiled function goes in its dictionary, and that function.
        self._calls: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        for name, parts in groups:
            sharded = sharded_parameter(parts[0]) is not None
            region = Region(name, settings, counters, dims, forward_only=sharded)
            place = "forward" if sharded else torch_private.COMPILED_CALL
            self._calls += [(part, place, _compiled_call(part, region)) for part in parts]

    def enable(self) -> None:
        """Call the parts compiled from now on; one that the user compiled is left alone."""
        for module, place, call in self._calls:
            if torch_private.is_compiled_by_user(module):
                continue
            if place == "forward" and "forward" in module.__dict__:
                module.__dict__[_OWN_FORWARD] = module.__dict__["forward"]
            module.__dict__[place] = call

    def disable(self) -> None:
        """Call the parts uncompiled from now on."""
        for module, place, call in self._calls:
            if module.__dict__.get(place) is call:
                del module.__dict__[place]
                if place == "forward" and _OWN_FORWARD in module.__dict__:
                    module.__dict__["forward"] = module.__dict__.pop(_OWN_FORWARD)


def _compiled_call(module: nn.Module, region: Region) -> Callable[..., Any]:
    """Return a replacement of ``module._compiled_call_impl``, which torch calls instead of ``module._call_impl``."""
    hooks = InstalledHooks(module, inside=region.forward_only)

    def call(*args: Any, **kwargs: Any) -> Any:
        return region(module, args, kwargs, hooks)

    return call


def _beside_attention(groups: list[tuple[str, list[nn.Module]]]) -> list[tuple[str, list[nn.Module]]]:
    """Return the largest parts of blocks that contain no attention, grouped by structure."""
    found: dict[Any, list[nn.Module]] = {}

    def visit(part: nn.Module) -> None:
        if not _has_children(part):
            return  # One layer is too small a graph.
        if any("attention" in type(inner).__name__.lower() for inner in part.modules()):
            for child in part.children():
                visit(child)
        elif next(part.parameters(), None) is not None:
            found.setdefault(_structure(part), []).append(part)

    for _, group in groups:
        for block in group:
            for child in block.children():
                visit(child)
    return [(kind.__name__, parts) for (kind, _), parts in found.items()]


def _structure(module: nn.Module) -> tuple[type[nn.Module], Any]:
    """Return what modules that can share a graph have in common: class, and names and shapes of parameters."""
    return type(module), tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())


def _has_children(module: nn.Module) -> bool:
    """Return whether a module is more than a single layer."""
    return next(module.children(), None) is not None


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts that a step may call without calling the whole model."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def alike_blocks(module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield (name, blocks) for each group of children of a list that share their structure; the outermost only.

    Example::

        >>> layers = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(3)]
        >>> [(name, len(blocks)) for name, blocks in alike_blocks(nn.Sequential(*layers))]
        [('TransformerEncoderLayer', 3)]

    """
    alike: dict[Any, list[nn.Module]] = {}
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        for child in module.children():
            # A single layer is too small a graph to gain anything.
            if _has_children(child):
                alike.setdefault(_structure(child), []).append(child)
    found = {id(block) for group in alike.values() if len(group) > 1 for block in group}
    for (kind, _), group in alike.items():
        if len(group) > 1:
            yield kind.__name__, group
    for child in module.children():
        if id(child) not in found:
            yield from alike_blocks(child)
