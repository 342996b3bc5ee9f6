"""Model parallel with the arguments of Lightning: layers are split over a group, and groups read different data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.strategies.mesh.sizes import DATA, TENSOR, Size
from hasten.strategies.mesh.strategy import MeshStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hasten.strategies.plans import Plan


class ModelParallelStrategy(MeshStrategy):
    """Split layers over the processes of a group (tensor parallel), and data and parameters over groups (FSDP).

    The processes form a mesh of ``data_parallel_size`` x ``tensor_parallel_size``. The module is divided by one of

    - ``plan``: hasten applies it after ``configure_model``;
    - ``configure_model`` of the LightningModule, with torch's ``parallelize_module`` and ``fully_shard`` on
      ``self.device_mesh["tensor_parallel"]`` and ``self.device_mesh["data_parallel"]``;
    - ``parallelize_fn``, in programs with Fabric.

    hasten shards with ``fully_shard`` whatever is not sharded over the groups by then. All processes of a
    tensor-parallel group read the same batches, and their random generators start equal.

    Args:
        parallelize_fn: called as ``parallelize_fn(module, device_mesh)``; divides the module in place and returns it.
        data_parallel_size: the number of groups; "auto" means one for each machine, or what
            ``tensor_parallel_size`` leaves.
        tensor_parallel_size: the number of processes of a group; "auto" means the devices of a machine, or what
            ``data_parallel_size`` leaves.
        save_distributed_checkpoint: write checkpoints as folders to which each process writes its shards; False
            writes one file with whole tensors.
        process_group_backend: "gloo", "nccl", ...; what suits the device by default.
        timeout: see ``ParallelStrategy``.
        plan: a dict of name patterns, relative to the module and with ``*`` between dots, and torch's
            ``ParallelStyle`` objects (or Hugging Face's names of them, such as ``"colwise"``); or "auto": the plan of
            the Hugging Face model in it, and a plan of hasten's for ``nn.TransformerEncoderLayer`` and
            ``nn.TransformerDecoderLayer``, whose feed-forward part is split and whose attention stays whole.
        sequence_parallel: with ``plan="auto"``, split the activations between the blocks of a Hugging Face decoder
            along the sequence.
        loss_parallel: compute cross entropy from logits that stay split over the classes; with ``plan="auto"`` the
            output layer leaves them so.
        expert_parallel: with ``plan="auto"``, divide whole experts of a mixture over the processes of a group, instead
            of splitting the matrices of each.

    It is ``MeshStrategy(shard=data_parallel_size, tensor=tensor_parallel_size)`` with Lightning's arguments.

    Raises:
        ValueError: the sizes do not multiply to the number of processes, or two arguments contradict each other.
        TypeError: an argument has a wrong type or is unknown.

    Example::

        >>> strategy = ModelParallelStrategy(
        ...     data_parallel_size=2, tensor_parallel_size=4, plan={"net.0": "colwise", "net.2": "rowwise"}
        ... )
        >>> strategy.name
        'model_parallel'

    Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053

    """

    name = "model_parallel"
    _owner: ClassVar[str] = "ModelParallelStrategy"
    _arguments: ClassVar[dict[str, str]] = {"shard": "data_parallel_size", "tensor": "tensor_parallel_size"}
    _always: ClassVar[tuple[str, ...]] = (DATA, TENSOR)

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], nn.Module] | None = None,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
        *,
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        expert_parallel: bool = False,
        **unknown: object,
    ) -> None:
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise make_error(
                TypeError,
                f"{self._owner}({check.shown(parallelize_fn)}): the first argument is parallelize_fn, "
                "a function of module and mesh.",
                fix=f"Write data_parallel_size={check.shown(parallelize_fn)}.",
            )
        check.boolean(self._owner, "save_distributed_checkpoint", save_distributed_checkpoint)
        # Here: the arguments of ``MeshStrategy`` are not those of this class.
        self._refuse_unknown(unknown)
        super().__init__(
            1,
            data_parallel_size,
            tensor_parallel_size,
            plan=plan,
            parallelize_fn=parallelize_fn,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            expert_parallel=expert_parallel,
            state_dict_type="sharded" if save_distributed_checkpoint else "full",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        # It splits layers by its nature, with any sizes.
        self.splits_layers = True
