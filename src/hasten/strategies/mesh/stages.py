"""The stages of a pipeline: which blocks of a module each computes, and the parameters that a process does not have.

A step runs on every stage, on the same batch. On a later stage, what comes before its first block computes nothing of
use: blocks of earlier stages pass their input on, and the first block gets the activations of the stage before in its
place. The step ends where the next stage begins. So masks, positions and labels are there on each stage, and one
tensor is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.observers import set_during
from hasten._lib.tree import ABSENT, is_absent, is_sharded, leaves, map_tensors
from hasten.seed import RandomGenerators
from hasten.strategies.mesh.blocks import name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Left(BaseException):
    """Ends a step where the next stage begins; no ``except Exception`` of a program catches it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Stages:
    """The stages of a module.

    ``split`` names the blocks at which stages begin, but the first; None divides the blocks evenly. ``mine`` are those
    of this process. ``sequences`` are the processes of which each has a part of the sequences that go from block to
    block, as a ``DTensor``; None if each has them whole. Messages name ``owner``.

    Raises:
        ValueError: the blocks cannot be divided.

    """

    def __init__(
        self,
        module: nn.Module,
        count: int,
        split: Sequence[str] | None,
        mine: Sequence[int],
        owner: str,
        sequences: DeviceMesh | None = None,
    ) -> None:
        self.count, self.mine, self._owner, self._sequences = count, tuple(mine), owner, sequences
        stages = stages_of_blocks(module, count, split, owner)
        self.names, self.stage_of = tuple(stages), list(stages.values())
        self._list_name = self.names[0].rpartition(".")[0]
        self._list = module.get_submodule(self._list_name)
        self._blocks = dict(self._list.named_children())
        # The place of the first block of each stage.
        self.begins = tuple(map(self.stage_of.index, range(count)))
        # The stages that have each parameter and buffer, by name: several where layers share it.
        self.owners = _owners(module, stages, count)
        self.absent: dict[str, nn.Parameter] = {}
        self._stage: int | None = None
        self._received: Tensor | None = None
        # Whether a step runs to its first block only: see ``input_of``.
        self._asks = False
        # What blocks of a class return, with None for the tensor that goes on.
        self._forms: dict[type, Any] = {}

    def leave_out(self, module: nn.Module, device: torch.device) -> None:
        """Replace the parameters of other stages by ones of the same shape that take no memory and hold no numbers.

        Frozen parameters outside of blocks stay everywhere: what is computed from them may reach every block.
        """
        whole = {id(p): p for name, p in _named(module) if not set(self.mine).isdisjoint(self.owners[name])}
        replaced: dict[int, nn.Parameter] = {}
        for name, parameter in _named(module):
            in_block = any(name.startswith(f"{block}.") for block in self.names)
            if id(parameter) in whole or not parameter.is_floating_point() or not (in_block or parameter.requires_grad):
                continue
            if id(parameter) not in replaced:
                nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                replaced[id(parameter)] = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
                setattr(replaced[id(parameter)], ABSENT, True)
            part, _, key = name.rpartition(".")
            module.get_submodule(part)._parameters[key] = self.absent[name] = replaced[id(parameter)]

    def divide_forward(self) -> None:
        """Let the blocks compute only in the steps of their stage; the last change to them."""
        for place, block in enumerate(self._blocks.values()):
            block.register_forward_pre_hook(partial(self._enter, place), prepend=True, with_kwargs=True)
            vars(block)["forward"] = partial(self._forward, place, block, block.forward)

    def run(self, stage: int, received: Tensor | None, step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Compute one stage of a step: return the activations for the next stage, or what the step returns.

        ``received`` are the activations of the stage before, None for the first.

        Raises:
            ValueError: the step does not call the blocks in their order.

        """
        self._stage, self._received = stage, received
        try:
            output = step(*arguments)
        except _Left as left:
            return self._local(left.hidden)
        finally:
            is_open, self._stage, self._received = self._received is not None, None, None
        if is_open or stage < self.count - 1:
            place = self.begins[stage if is_open else stage + 1]
            raise self._refused(
                f"the step ended before it called {self.names[place]!r}.",
                "Call all blocks in each step, one after the other.",
            )
        return output

    def input_of(self, stage: int, step: Callable[..., Any], arguments: Sequence[Any]) -> Tensor:
        """Return a tensor like the one that a later stage gets, from what comes before the blocks in a step."""
        with set_during(self, _asks=True), torch.no_grad():
            hidden: Tensor = self.run(stage, torch.empty(()), step, arguments)
            return hidden

    def check_gradients(self) -> None:
        """Raise if a stage has used a parameter that it does not have."""
        for name, parameter in self.absent.items():
            if parameter.grad is not None:
                held = self.owners[name][0]
                where = f"{'before' if held else 'after'} {self._list_name!r}"
                raise self._refused(
                    f"stage {self.mine[-1]} computes with {name!r}, which is in stage {held}.",
                    f"Blocks take one tensor from the blocks before. If {name!r} is of a layer outside of them, assign "
                    f"it {where} in __init__().",
                )

    @contextmanager
    def own_only(self, module: nn.Module) -> Iterator[set[str]]:
        """Show only the parameters that this process has, within the context; yield the names of the others."""
        tables = [(part._parameters, dict(part._parameters)) for part in module.modules()]
        for table, before in tables:
            for key, parameter in before.items():
                if parameter is not None and is_absent(parameter):
                    del table[key]
        try:
            yield set(self.absent)
        finally:
            for table, before in tables:
                table.clear()
                table.update(before)

    # -- the blocks

    def _enter(self, place: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a stage at its first block, or end it before the first block of the next."""
        if self._stage is None:
            if place in self.begins[1:] and torch_private.is_in_backward():
                raise self._refused(
                    f"{self.names[place]!r} is computed again in backward, by code of the model.",
                    "Use Trainer(memory='full') in its place.",
                )
            return None
        if self._received is not None and place == self.begins[self._stage]:
            if self._asks:
                raise _Left(self._hidden(place, args, kwargs))
            args, kwargs = self._replaced(place, self._received, args, kwargs)
            self._received = None
            return args, kwargs
        if self.stage_of[place] > self._stage:
            if self._received is not None or place != self.begins[self._stage + 1]:
                raise self._refused(
                    f"stage {self._stage} called {self.names[place]!r}.", "Call the blocks one after the other."
                )
            raise _Left(self._hidden(place, args, kwargs))
        return None

    def _forward(self, place: int, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a block; pass on the input of one that belongs to an earlier stage."""
        stage = self.stage_of[place]
        if self._stage is not None and stage < self._stage:
            hidden = self._hidden(place, args, kwargs)
            if isinstance(self._list, nn.Sequential):
                return hidden
            if type(block) not in self._forms:
                self._forms[type(block)] = _form_of(forward, args, kwargs)
            form = self._forms[type(block)]
            return hidden if form is None else form(hidden)
        if stage not in self.mine:
            what = f"{self._owner}(pipeline=...): {self.names[place]!r} is in another process, in stage {stage}."
            fix = "Call the model in training_step, validation_step, test_step or predict_step only."
            raise make_error(RuntimeError, what, fix=fix)
        return forward(*args, **kwargs)

    def _hidden(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor):
            raise self._refused(
                f"the first argument of {self.names[place]!r} is a {type(hidden).__name__}.",
                "Let blocks take the tensor that goes from block to block as their first argument.",
            )
        return hidden

    def _local(self, hidden: Tensor) -> Tensor:
        """Return this process's part of what the next stage gets."""
        value: Any = hidden
        mesh = self._sequences
        if not is_sharded(value):
            # With parts of sequences only from layers that this process does not have, see ``input_of``.
            return hidden if mesh is None else hidden.tensor_split(mesh.size(), 1)[mesh.get_local_rank()]
        if mesh is None:
            raise self._refused(
                "blocks pass on a DTensor.",
                "Let them return plain tensors, or use plan='auto', sequence_parallel=True.",
            )
        part: Tensor = value.to_local()
        return part

    def _replaced(self, place: int, received: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = self._hidden(place, args, kwargs)
        if self._sequences is not None:
            from torch.distributed.tensor import DTensor, Shard

            received = DTensor.from_local(
                received, self._sequences, [Shard(1)], run_check=False, shape=hidden.shape, stride=hidden.stride()
            )
        key = "" if args else next(iter(kwargs))
        others = [args[1:], {name: value for name, value in kwargs.items() if name != key}]
        if any(isinstance(one, Tensor) and one.requires_grad for one in leaves(others)):
            raise self._refused(
                f"{self.names[place]!r} takes a second tensor that depends on parameters.",
                "Begin the stage elsewhere, or let one tensor go from block to block.",
            )
        return ((received, *args[1:]), kwargs) if args else (args, {**kwargs, key: received})

    def _refused(self, what: str, fix: str) -> Exception:
        return MisconfigurationException(f"{self._owner}(pipeline=...): {what}", fix=fix, argument="pipeline")


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with all their names: several for one that layers share."""
    return list(module.named_parameters(remove_duplicate=False))


def _form_of(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a function that puts a tensor into what a block returns; None if a block returns the tensor itself."""
    generators = RandomGenerators()
    before = generators.state_dict()
    try:
        with torch.no_grad():
            output = forward(*args, **kwargs)
    except Exception:
        # Without numbers in its parameters it may fail.
        return None
    finally:
        generators.load_state_dict(before)
    if isinstance(output, Tensor):
        return None

    def form(hidden: Tensor) -> Any:
        given = iter([hidden])
        return map_tensors(lambda tensor: next(given, tensor), output)

    return form


# -- which block belongs to which stage


def stages_of_blocks(module: nn.Module, count: int, split: Sequence[str] | None, owner: str) -> dict[str, int]:
    """Return the stage of each block of a module, by its name; see ``Stages`` for the arguments.

    Raises:
        ValueError: the blocks cannot be divided.

    """
    parent = _list_of(module, count, owner) if split is None else _parent_of(module, split, owner)
    names = [f"{parent}.{key}" if parent else key for key, _ in module.get_submodule(parent).named_children()]
    begins = _begins(names, split, count, owner)
    return {name: sum(place >= begin for begin in begins) - 1 for place, name in enumerate(names)}


def _list_of(module: nn.Module, count: int, owner: str) -> str:
    """Return the name of the list of blocks with the most parameters."""
    lists = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) >= count
    }
    if not lists:
        raise MisconfigurationException(
            f"{owner}(pipeline=...): {name_of(module)} has no nn.ModuleList or nn.Sequential of at least {count} "
            "blocks.",
            fix="Put its blocks into one, which it calls one after the other.",
            argument="pipeline",
        )
    most: str = max(lists, key=lambda name: lists[name])
    return most


def _parent_of(module: nn.Module, split: Sequence[str], owner: str) -> str:
    """Return the name of the list in which all blocks are that ``split`` names."""
    known = dict(module.named_modules())
    for name in split:
        if name not in known or not name:
            what = f"{owner}(split=[{name!r}]): {name_of(module)} has no such module."
            fix = did_you_mean(name, list(known)) or "Write the name of a block, such as 'layers.4'."
            raise make_error(ValueError, what, fix=fix, argument="split")
    parents = {name.rpartition(".")[0] for name in split}
    parent = known[min(parents)]
    if len(parents) > 1 or not isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        what = f"{owner}(split={list(split)}): stages begin at blocks of one list."
        fix = "Name blocks of one nn.ModuleList, nn.Sequential or nn.ModuleDict."
        raise make_error(ValueError, what, fix=fix, argument="split")
    return min(parents)


def _begins(names: Sequence[str], split: Sequence[str] | None, count: int, owner: str) -> tuple[int, ...]:
    """Return the place of the first block of each stage.

    Example::

        >>> _begins(["a", "b", "c", "d", "e"], None, 3, "")
        (0, 2, 4)
        >>> _begins(["a", "b", "c"], ["c"], 2, "")
        (0, 2)

    """
    if split is None:
        # What is left over goes to the first stages: the last one has the output layer, often the largest.
        return tuple(-(-stage * len(names) // count) for stage in range(count))
    begins = (0, *(names.index(name) for name in split))
    if list(begins) != sorted(set(begins)):
        what = f"{owner}(split={list(split)}): the first stage begins with {names[0]!r}, and others after it."
        raise make_error(ValueError, what, fix="Name later blocks, in their order.", argument="split")
    return begins


def _owners(module: nn.Module, stages: dict[str, int], count: int) -> dict[str, tuple[int, ...]]:
    """Return the stages that have each parameter and buffer: those of layers before the blocks are in the first."""
    of_tensor: dict[int, set[int]] = {}
    stage = 0
    passed = False
    for name, part in module.named_modules(remove_duplicate=False):
        block = next((one for one in stages if name == one or name.startswith(f"{one}.")), None)
        passed = passed or block is not None
        stage = stages[block] if block is not None else count - 1 if passed else 0
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                of_tensor.setdefault(id(tensor), set()).add(stage)
    tensors = [*_named(module), *module.named_buffers(remove_duplicate=False)]
    return {name: tuple(sorted(of_tensor[id(tensor)])) for name, tensor in tensors}
