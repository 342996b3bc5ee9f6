"""The sizes of a mesh of processes, and the names of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

Size = int | Literal["auto"]

# The dimensions of the mesh of parameters, outermost first.
PIPELINE, REPLICATE, DATA, TENSOR = "pipeline", "replicate", "data_parallel", "tensor_parallel"
# The dimensions of the mesh of batches, beside TENSOR.
BATCHES, CONTEXT = "batches", "context"
# The dimensions of the mesh of experts, outermost first.
EXPERT_COPIES, EXPERT_SHARDS, EXPERT = "expert_copies", "expert_shards", "expert"


def is_split(parameter: nn.Parameter) -> bool:
    """Return whether the processes of a tensor-parallel group have a parameter in common."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and TENSOR in (mesh.mesh_dim_names or ())


@dataclass(frozen=True)
class MeshSizes:
    """How the processes of a run are divided: ``pipeline * replicate * shard * context * tensor`` of them.

    The ranks of one tensor-parallel group follow each other, so that it stays within a machine, and those of the groups
    that divide sequences come next. The processes of one pipeline are the furthest from each other.

    Args:
        replicate: how many copies of all shards there are.
        shard: over how many processes parameters, gradients and optimizer states are divided.
        tensor: over how many processes layers are split.
        context: over how many processes sequences are divided. Parameters are sharded over them, too.
        pipeline: over how many processes the layers are divided, one after the other.
        expert: over how many processes the experts of a mixture are divided. These are processes of the other axes, so
            it is no factor of their number: each computes the other layers as those axes say.

    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @classmethod
    def of(cls, asked: Mapping[str, Size], *, num_nodes: int, per_node: int, expert: int = 1) -> MeshSizes:
        """Return the sizes for a number of machines and processes on each.

        Args:
            asked: the size of each axis, 1 by default. One that is "auto" gets what the others leave. Of two, the outer
                one gets the number of machines.
            num_nodes: the number of machines.
            per_node: the processes of each.
            expert: the processes over which experts are divided.

        """
        world = num_nodes * per_node
        sizes: dict[str, Size] = {**dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor"), 1), **asked}
        open_axes = [axis for axis, size in sizes.items() if size == "auto"]
        if len(open_axes) > 1:
            sizes[open_axes.pop(0)] = num_nodes
        known = math.prod(size for size in sizes.values() if isinstance(size, int))
        for axis in open_axes:
            sizes[axis] = world // known if world % known == 0 else 0
        found = cls(**{axis: int(size) for axis, size in sizes.items()}, expert=expert)
        if len(open_axes) > 1 or found.processes != world:
            raise ValueError(world)
        return found

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def batches(self) -> int:
        """How many parts the data has."""
        return self.replicate * self.shard

    @property
    def alike(self) -> int:
        """How many processes of a stage, whose ranks follow each other, read the same batches."""
        return self.context * self.tensor

    def named(self, *, always: Container[str] = ()) -> dict[str, int]:
        """Return the sizes by name, as arguments of ``MeshStrategy``, without those that are 1, except ``always``.

        Example::

            >>> MeshSizes(shard=8, expert=4).named(always=["replicate"])
            {'replicate': 1, 'shard': 8, 'expert': 4}

        """
        return {axis: size for axis, size in asdict(self).items() if size > 1 or axis in always}

    def dimensions(self, *, always: Container[str] = ()) -> dict[str, int]:
        """Return names and sizes of the dimensions of the mesh of parameters, those of size 1 only if ``always``."""
        sizes = {
            PIPELINE: self.pipeline,
            REPLICATE: self.replicate,
            DATA: self.shard * self.context,
            TENSOR: self.tensor,
        }
        return {name: size for name, size in sizes.items() if size > 1 or name in always or name == DATA}

    def dimensions_of_experts(self) -> dict[str, int]:
        """Return names and sizes of the dimensions of the mesh of experts: their copies, shards and groups.

        The ranks of a group, which has all experts, follow each other. As far as a group is smaller than a copy of the
        other parameters, the experts of each of its processes are sharded over the other groups of this copy.
        """
        copy = self.shard * self.context * self.tensor
        shards = max(copy // self.expert, 1)
        copies = self.processes // (shards * self.expert)
        if max(copy, self.expert) % min(copy, self.expert) or copies * shards * self.expert != self.processes:
            raise ValueError(self.expert)
        sizes = {EXPERT_COPIES: copies, EXPERT_SHARDS: shards, EXPERT: self.expert}
        return {name: size for name, size in sizes.items() if size > 1 or name != EXPERT_COPIES}


@dataclass(frozen=True)
class ShardLayout:
    """The result of dividing a module: its blocks, the rest, and the mesh.

    Args:
        blocks: names of the parts whose parameters are gathered together, each by itself.
        root: names of the parameters that are gathered with the whole module, for all of its forward.
        mesh: the shape of the device mesh: ``(shards,)`` or ``(replicas, shards)``.

    """

    blocks: tuple[str, ...]
    root: tuple[str, ...]
    mesh: tuple[int, ...]

    def __str__(self) -> str:
        return f"{len(self.blocks)} blocks, {len(self.root)} parameters in the root, mesh {self.mesh}"
