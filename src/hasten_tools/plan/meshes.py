"""Meshes for a number of devices: which are worth a plan, the strategy of each, and the memory to expect."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from hasten._lib import check
from hasten._lib.errors import make_error, parts_of
from hasten._lib.names import did_you_mean
from hasten.strategies.mesh.sizes import MeshSizes, Size
from hasten.strategies.mesh.strategy import MeshStrategy
from hasten_tools.plan.report import KEPT, Measured

if TYPE_CHECKING:
    from hasten.types import StrategyLike

# Sizes by the names of the axes, three or four sizes in order, or "auto" for a search. One of them may be "auto".
Mesh = Mapping[str, Size] | Sequence[Size] | Literal["auto"]

# Every axis, and those of sizes without names.
AXES = tuple(axis.name for axis in fields(MeshSizes))
IN_ORDER = ("replicate", "shard", "tensor", "pipeline")
# Layers are split over at most so many processes: each of them exchanges activations in each layer.
MOST_TENSOR = 8
# A pipeline that is proposed has at most so many stages: each waits for the others.
MOST_STAGES = 16
_OFFLOADED = "fsdp_cpu_offload"


def by_name(mesh: Mapping[str, Size] | Sequence[Size]) -> dict[str, Size]:
    """Return the sizes of a mesh by the names of their axes, as arguments of ``MeshStrategy``.

    Example::

        >>> by_name((2, "auto", 8)), by_name({"tensor": 8, "expert": 2})
        ({'shard': 'auto', 'replicate': 2, 'tensor': 8}, {'shard': 'auto', 'tensor': 8, 'expert': 2})

    """
    if not isinstance(mesh, Mapping):
        if len(mesh) not in (3, len(IN_ORDER)):
            fix = "use three sizes, (replicate, shard, tensor), four with pipeline after them, or a dict of names."
            raise make_error(ValueError, f"mesh={tuple(mesh)}:", fix=fix, argument="mesh")
        mesh = dict(zip(IN_ORDER, mesh, strict=False))
    for axis, size in mesh.items():
        if axis not in AXES:
            fix = did_you_mean(axis, AXES) or "Leave it out."
            raise make_error(
                ValueError, f"mesh has no axis {axis!r}: it has {', '.join(AXES)}.", fix=fix, argument="mesh"
            )
        if size != "auto" or axis == "expert":
            check.whole("mesh", axis, size, at_least=1, allowed="a number of processes of at least 1, or 'auto'")
    return {"shard": "auto", **mesh}


def processes_of(mesh: Mesh | None) -> int | None:
    """Return the number of processes of a mesh; None if its sizes do not say it."""
    if mesh is None or isinstance(mesh, str):
        return None
    sizes = [size for axis, size in by_name(mesh).items() if axis != "expert"]
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(sizes) else None


def sizes_of(mesh: Mapping[str, Size] | Sequence[Size], devices: int, nodes: int) -> MeshSizes:
    """Return given sizes as numbers.

    "auto" in ``mesh`` is what the others leave; see ``Mesh``.

    Raises:
        ValueError: they are no sizes of a mesh, or do not multiply to the number of devices.

    Example::

        >>> sizes_of((2, "auto", 8), devices=1024, nodes=128)
        MeshSizes(replicate=2, shard=64, tensor=8, context=1, pipeline=1, expert=1)

    """
    asked = by_name(mesh)
    axes = {axis: size for axis, size in asked.items() if axis != "expert"}
    try:
        return MeshSizes.of(axes, num_nodes=nodes, per_node=devices // nodes, expert=int(asked.get("expert", 1)))
    except ValueError:
        words = [f"{axis}={size}" for axis, size in mesh.items()] if isinstance(mesh, Mapping) else map(str, mesh)
        raise wrong_sizes(f"The mesh {','.join(words)} is not one of {devices:,} devices.", asked, devices) from None


def wrong_sizes(problem: str | Exception, asked: Mapping[str, Size], devices: int) -> ValueError:
    """Return the error for sizes that do not multiply to the number of devices, with sizes that do."""
    what = problem if isinstance(problem, str) else parts_of(problem).what
    near = _words(_near(asked, devices)).replace(" ", "")
    return make_error(ValueError, what, fix=f"Use --mesh {near}.", argument="mesh")


def _near(asked: Mapping[str, Size], devices: int) -> MeshSizes:
    """Return sizes for a number of devices that keep as many of those asked for as possible."""
    given = {axis: size for axis, size in asked.items() if axis != "shard" and isinstance(size, int)}
    without_copies = {**given, "replicate": 1}
    only_copies = {"replicate": given.get("replicate", 1)}
    for kept in (given, without_copies, only_copies):
        one = MeshSizes(**kept)
        if devices % one.processes == 0:
            return replace(one, shard=devices // one.processes)
    return MeshSizes(shard=devices)


# -- the strategy of a mesh


def strategy_of(sizes: MeshSizes, own: StrategyLike | None) -> MeshStrategy:
    """Return the strategy with which a program trains on a mesh.

    The other arguments of a ``MeshStrategy`` of the program's own stay, among them its plan.
    """
    is_split = sizes.tensor > 1
    made = MeshStrategy(
        **asdict(sizes),
        **_stages(sizes, own),
        plan="auto" if is_split and not _splits(own) else None,
        cpu_offload=own == _OFFLOADED,
    )
    if isinstance(own, MeshStrategy):
        # Without the type in which an earlier run has gathered parameters.
        made.shards = copy.copy(own.shards)
        made.shards.param_dtype = None
        if is_split and own.splits_layers:
            made.layers = own.layers
    return made


def line_of(sizes: MeshSizes, own: StrategyLike | None) -> str:
    """Return what to write for a mesh; the arguments are those of ``strategy_of``.

    Example::

        >>> line_of(MeshSizes(2, 64, 8), "fsdp")
        'MeshStrategy(replicate=2, shard=64, tensor=8, plan="auto")'

    """
    words = _words(sizes)
    if sizes.tensor > 1 and not _splits(own):
        words += ', plan="auto"'
    elif sizes.tensor > 1 and isinstance(own, MeshStrategy) and own.layers.is_given:
        words += ", plan=..."
    words += "".join(f", {name}={value!r}" for name, value in _stages(sizes, own).items() if value is not None)
    return f"MeshStrategy({words}{', cpu_offload=True' if own == _OFFLOADED else ''})"


def _words(sizes: MeshSizes) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.named(always=("shard",)).items())


def _stages(sizes: MeshSizes, own: StrategyLike | None) -> dict[str, Any]:
    """Return the arguments of the pipeline of the program's strategy, for a mesh that has one."""
    if sizes.pipeline > 1 and isinstance(own, MeshStrategy) and own.pipeline is not None:
        return own.pipeline.arguments
    return {}


def _splits(own: StrategyLike | None) -> bool:
    """Return whether the program's strategy says how to split layers."""
    return isinstance(own, MeshStrategy) and own.splits_layers


# -- the meshes of a number of devices


def candidates(devices: int, nodes: int) -> list[list[MeshSizes]]:
    """Return the meshes that may be worth a plan, those with the same axes together.

    First come those that split layers over 1 to 8 processes of a machine, then pipelines: whose stages are on different
    machines if there are several, with layers that are whole or split as much as possible. Of each, the mesh without
    copies, which takes the least memory, comes first, then those with the most copies.

    Example::

        >>> found = candidates(8, nodes=4)
        >>> [(one.replicate, one.shard, one.tensor) for one in found[0]]
        [(1, 8, 1), (8, 1, 1), (4, 2, 1), (2, 4, 1)]
        >>> [(one.replicate, one.shard, one.tensor) for one in found[1]]
        [(1, 4, 2), (4, 1, 2), (2, 2, 2)]
        >>> [(one.replicate, one.shard, one.tensor, one.pipeline) for one in found[2]]
        [(1, 4, 1, 2), (4, 1, 1, 2), (2, 2, 1, 2)]

    """
    per_machine = devices // nodes
    splits = [size for size in range(1, MOST_TENSOR + 1) if per_machine % size == 0]
    stages = [size for size in range(2, MOST_STAGES + 1) if (nodes if nodes > 1 else devices) % size == 0]
    bases = [MeshSizes(tensor=size) for size in splits]
    bases += [MeshSizes(tensor=size, pipeline=count) for count in stages for size in sorted({1, splits[-1]})]
    return [_with_copies(base, devices, nodes) for base in bases if devices % base.processes == 0]


def with_experts(devices: int, nodes: int, experts: int) -> list[list[MeshSizes]]:
    """Return the meshes that divide experts over processes of a machine, or over as many as there are experts.

    Example::

        >>> [[(one.replicate, one.shard, one.expert) for one in some] for some in with_experts(8, 4, 4)]
        [[(1, 8, 4), (8, 1, 4), (4, 2, 4), (2, 4, 4)], [(1, 8, 2), (8, 1, 2), (4, 2, 2), (2, 4, 2)]]

    """
    per_machine = devices // nodes
    sizes = [size for size in range(experts, 1, -1) if experts % size == 0 and devices % size == 0]
    close = [size for size in sizes if per_machine % size == 0 or size == experts]
    return [_with_copies(MeshSizes(expert=size), devices, nodes) for size in close]


def _with_copies(base: MeshSizes, devices: int, nodes: int) -> list[MeshSizes]:
    whole_machines = {copies for copies in range(2, nodes + 1) if nodes % copies == 0}
    most = devices // base.processes
    several = sorted({*whole_machines, most} - {1}, reverse=True)
    fitting = [copies for copies in (1, *several) if most % copies == 0]
    return [replace(base, replicate=copies, shard=most // copies) for copies in fitting]


def expected_memory(found: Measured, sizes: MeshSizes) -> int:
    """Return about how much memory a device needs on a mesh, in bytes.

    ``found`` is of a mesh that splits layers over as many processes, ``sizes`` of one with fewer shards.
    """
    if found.cpu_offload:
        return found.on_device
    kept = sum(found.peak_parts.get(name, 0) for name in KEPT)
    return found.on_device + math.ceil(kept * (found.mesh["shard"] / sizes.shard - 1))


def to_plan(
    devices: int,
    nodes: int,
    usable: float | None,
    found: Mapping[MeshSizes, Measured],
    reasons: dict[MeshSizes, str],
    cannot_win: Callable[[MeshSizes], str],
) -> Iterator[MeshSizes]:
    """Yield meshes one by one, and leave out those of which the plans so far say that they need no plan.

    The memory of a device is ``usable`` bytes, None if that is not known. Plans are read from ``found`` before each
    mesh; ``reasons`` gets why meshes have none. ``cannot_win`` returns why a mesh cannot be the best one; "" if it can.
    """
    whole, *others = candidates(devices, nodes)
    splits = [some for some in others if some[0].pipeline == 1]
    # The two extremes, then in turns.
    turns = [whole, *splits[-1:], whole, *splits[:-1], *(some for some in others if some[0].pipeline > 1)]
    left = {id(some): iter(some) for some in turns}
    has_experts = False

    def following(some: list[MeshSizes]) -> MeshSizes | None:
        first = some[0]
        for sizes in left[id(some)]:
            if sizes != first and first in reasons:
                # Layers that cannot be split over so many processes.
                reasons[sizes] = reasons[first]
            elif sizes != first and usable and first in found and expected_memory(found[first], sizes) > usable:
                reasons[sizes] = "more shards are needed for this memory"
            elif reason := cannot_win(sizes):
                reasons[sizes] = reason
            else:
                return sizes
        return None

    while turns:
        if not has_experts and (counts := [one.experts for one in found.values() if one.experts > 1]):
            has_experts = True
            more = with_experts(devices, nodes, counts[0])
            left |= {id(some): iter(some) for some in more}
            turns = [*more, *turns]
        some = turns.pop(0)
        if (sizes := following(some)) is not None:
            yield sizes
            if not any(some is one for one in turns):
                turns.append(some)
