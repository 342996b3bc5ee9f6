"""Meshes for a number of devices: which are worth a plan, the strategy of each, and the memory to expect."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hasten._lib import check
from hasten._lib.errors import make_error, parts_of
from hasten.strategies.mesh.sizes import MeshSizes, Size
from hasten.strategies.mesh.strategy import MeshStrategy
from hasten_tools.plan.report import KEPT, Measured

if TYPE_CHECKING:
    from hasten.types import StrategyLike

# Three sizes or four, of which one may be "auto", or "auto" for a search.
Mesh = Sequence[Size] | Literal["auto"]

AXES = ("replicate", "shard", "tensor", "pipeline")
# Layers are split over at most so many processes: each of them exchanges activations in each layer.
MOST_TENSOR = 8
_OFFLOADED = "fsdp_cpu_offload"


def sizes_of(mesh: Sequence[Size], devices: int, nodes: int) -> MeshSizes:
    """Return given sizes as numbers.

    Args:
        mesh: for replicate, shard, tensor and, if there are four, pipeline; "auto" is what the others leave.
        devices: the number of processes.
        nodes: the number of machines they are on.

    Raises:
        ValueError: they are not three sizes or four, or do not multiply to the number of devices.

    Example::

        >>> sizes_of((2, "auto", 8), devices=1024, nodes=128)
        MeshSizes(replicate=2, shard=64, tensor=8, context=1, pipeline=1, expert=1)

    """
    if len(mesh) not in (3, len(AXES)):
        fix = "use three sizes, (replicate, shard, tensor), or four, with pipeline after them."
        raise make_error(ValueError, f"mesh={tuple(mesh)}:", fix=fix, argument="mesh")
    asked = dict(zip(AXES, mesh, strict=False))
    for axis, size in asked.items():
        if size != "auto":
            check.whole("mesh", axis, size, at_least=1, allowed="a number of processes of at least 1, or 'auto'")
    try:
        return MeshSizes.of(asked, num_nodes=nodes, per_node=devices // nodes)
    except ValueError:
        sizes = ",".join(map(str, mesh))
        raise wrong_sizes(f"The mesh {sizes} is not one of {devices:,} devices.", asked, devices) from None


def wrong_sizes(problem: str | Exception, asked: Mapping[str, Size], devices: int) -> ValueError:
    """Return the error for sizes that do not multiply to the number of devices, with sizes that do.

    Args:
        problem: what is wrong, or the error that says so.
        asked: the sizes that were given.
        devices: the number of processes.

    """
    what = problem if isinstance(problem, str) else parts_of(problem).what
    near = _near(asked, devices)
    return make_error(
        ValueError,
        what,
        fix=f"Use --mesh {near.replicate},{near.shard},{near.tensor} ({_words(near)}).",
        argument="mesh",
    )


def _near(asked: Mapping[str, Size], devices: int) -> MeshSizes:
    """Return sizes for a number of devices that keep as many of those asked for as possible."""
    replicate, _, tensor = (size if isinstance(size := asked.get(axis, 1), int) else 1 for axis in AXES[:3])
    for copies, split in ((replicate, tensor), (1, tensor), (replicate, 1)):
        if devices % (copies * split) == 0:
            return MeshSizes(copies, devices // (copies * split), split)
    return MeshSizes(1, devices, 1)


# -- the strategy of a mesh


def strategy_of(sizes: MeshSizes, own: StrategyLike | None) -> MeshStrategy:
    """Return the strategy with which a program trains on a mesh.

    Args:
        sizes: of the mesh.
        own: the program's strategy. The other arguments of a ``MeshStrategy`` stay, among them its plan.

    """
    is_split = sizes.tensor > 1
    stages: dict[str, Any] = {}
    if sizes.pipeline > 1 and isinstance(own, MeshStrategy) and own.pipeline is not None:
        stages = own.pipeline.arguments
    made = MeshStrategy(
        *(sizes.replicate, sizes.shard, sizes.tensor),
        **stages,
        pipeline=sizes.pipeline,
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
    return f"MeshStrategy({words}{', cpu_offload=True' if own == _OFFLOADED else ''})"


def _words(sizes: MeshSizes) -> str:
    named = {axis: getattr(sizes, axis) for axis in AXES}
    return ", ".join(f"{axis}={size}" for axis, size in named.items() if size > 1 or axis == "shard")


def _splits(own: StrategyLike | None) -> bool:
    """Return whether the program's strategy says how to split layers."""
    return isinstance(own, MeshStrategy) and own.splits_layers


# -- the meshes of a number of devices


def candidates(devices: int, nodes: int) -> dict[int, list[MeshSizes]]:
    """Return the meshes that may be worth a plan, by the number of processes over which layers are split.

    Layers are split over 1 to 8 processes of a machine, and copies are of whole machines, or of one tensor-parallel
    group each. The mesh without copies, which takes the least memory, comes first, then those with the most copies.

    Args:
        devices: the number of processes.
        nodes: the number of machines they are on.

    Example::

        >>> found = candidates(8, nodes=4)
        >>> [(one.replicate, one.shard, one.tensor) for one in found[1]]
        [(1, 8, 1), (8, 1, 1), (4, 2, 1), (2, 4, 1)]
        >>> [(one.replicate, one.shard, one.tensor) for one in found[2]]
        [(1, 4, 2), (4, 1, 2), (2, 2, 2)]

    """
    per_machine = devices // nodes
    whole_machines = {copies for copies in range(2, nodes + 1) if nodes % copies == 0}
    found: dict[int, list[MeshSizes]] = {}
    for tensor in (size for size in range(1, MOST_TENSOR + 1) if per_machine % size == 0):
        several = sorted({*whole_machines, devices // tensor} - {1}, reverse=True)
        found[tensor] = [MeshSizes(copies, devices // (copies * tensor), tensor) for copies in (1, *several)]
    return found


def expected_memory(found: Measured, sizes: MeshSizes) -> int:
    """Return about how much memory a device needs on a mesh, in bytes.

    Args:
        found: of a mesh that splits layers over as many processes.
        sizes: of a mesh with fewer shards.

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
) -> Iterator[MeshSizes]:
    """Yield meshes one by one, and leave out those of which the plans so far say that they need no plan.

    Args:
        devices: the number of processes.
        nodes: the number of machines they are on.
        usable: memory of a device, in bytes; None if it is not known.
        found: the plans so far; read before each mesh.
        reasons: why meshes have no plan; added to.

    """
    meshes = candidates(devices, nodes)
    queues = {tensor: iter(sizes) for tensor, sizes in meshes.items()}

    def following(tensor: int) -> MeshSizes | None:
        first = meshes[tensor][0]
        for sizes in queues[tensor]:
            if sizes != first and first in reasons:
                # Layers that cannot be split over so many processes.
                reasons[sizes] = reasons[first]
            elif sizes != first and usable and first in found and expected_memory(found[first], sizes) > usable:
                reasons[sizes] = "more shards are needed for this memory"
            else:
                return sizes
        return None

    whole, *splits = meshes
    # The two extremes, then in turns.
    turns = [whole, *splits[-1:], whole, *splits[:-1]]
    while turns:
        tensor = turns.pop(0)
        if (sizes := following(tensor)) is not None:
            yield sizes
            if tensor not in turns:
                turns.append(tensor)
