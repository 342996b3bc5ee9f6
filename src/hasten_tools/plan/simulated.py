"""Simulate one rank of a large job with a fake process group and fake tensors.

It is entered in a process that does nothing else afterwards: functions of torch are replaced and stay so. What it
relies on of torch is private: the backend "fake" and ``FakeStore`` of ``torch.testing._internal.distributed.fake_pg``,
``FakeTensorMode``, the shapes of collectives in ``torch.distributed._tools.fake_collectives``, and that the collectives
of FSDP2 call ``torch.chunk`` and ``torch.cat``. All are in the package that users install.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.tree import is_sharded, leaves, map_leaves
from hasten.hooks import nothing
from hasten.logged_value import is_metric
from hasten.machine import collectives, same_program
from hasten.machine.cluster import ClusterEnvironment
from hasten.seed import RandomGenerators
from hasten.strategies.base import Strategy
from hasten.strategies.ddp import DDPStrategy
from hasten.strategies.experts import ExchangedExperts, WholeExperts
from hasten.strategies.mesh.sizes import MeshSizes, Size
from hasten.strategies.mesh.strategy import MeshStrategy

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hasten.types import Batch


class SimulatedCluster(ClusterEnvironment):
    """A cluster of which one process exists."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    @staticmethod
    def detect() -> bool:
        """Return False: nothing runs in it unless it is passed."""
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


class _Pieces(NamedTuple):
    """A tensor that is divided evenly along a dimension."""

    whole: Tensor
    number: int
    dim: int


class _TorchOfShards:
    """Torch, as FSDP's collectives see it, where pieces of a tensor are no tensors.

    What is sharded along another dimension than the first is cut in a piece for each process, and put together again.
    With thousands of processes, the shapes of these pieces took most of the time of a plan.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, whole: Tensor, chunks: int, dim: int) -> _Pieces:
        return _Pieces(whole, chunks, dim)

    def cat(self, pieces: _Pieces | list[Tensor], dim: int, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(pieces, _Pieces):
            return torch.cat(pieces, dim, out=out)
        if out is not None:
            return out
        shape = list(pieces.whole.shape)
        shape[pieces.dim] //= pieces.number
        shape[dim] *= pieces.number
        return pieces.whole.new_empty(shape)


class _Work(NamedTuple):
    """A transfer to another process, or from it, that is over."""

    tensors: list[Tensor]

    def wait(self, timeout: object = None) -> bool:
        return True


def _keep_transferred() -> None:
    """Keep what is sent or received for as long as the work that says when it is over, as gloo and NCCL do."""
    from torch.distributed import ProcessGroup

    for name in ("send", "recv"):
        method = getattr(ProcessGroup, name)

        def transfer(self: ProcessGroup, tensors: list[Tensor], *place: int, method: Any = method) -> _Work:
            method(self, tensors, *place)
            return _Work(tensors)

        setattr(ProcessGroup, name, transfer)


def join(size: int, rank: int) -> None:
    """Make this process one of ``size``, in a group whose collectives return at once."""
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401 - registers the shapes of collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    vars(_fsdp_collectives)["torch"] = _TorchOfShards()
    _keep_transferred()

    collectives.leave()
    for name in ("require_same", "require_same_module"):
        # Nobody answers.
        setattr(same_program, name, lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def load() -> None:
    """Import what a plan needs of torch, once for all copies of this process."""
    import torch._dynamo.eval_frame
    import torch._subclasses.fake_tensor
    import torch.distributed._tools.fake_collectives
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.fx.experimental.symbolic_shapes
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def fake_mode() -> FakeTensorMode:
    """Return a mode in which operations compute shapes only."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def on_real_tensors() -> AbstractContextManager[Any]:
    """Compute as usual within the block: the program reads its data."""
    return torch_private.without_modes()


def without_data(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers of ``module`` by some of the same shape that have no data, in place.

    What is on the meta device stays there.
    """
    made: dict[int, Tensor] = {}

    def replacement(name: str, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):
            what = f"{name!r}, of a lazy layer, has no shape yet."
            fix = "Write the layer with its input size, or run a batch through the module before."
            raise make_error(ValueError, what, fix=fix)
        if is_sharded(tensor):
            return tensor  # Divided in configure_model(), where it had no data.
        if id(tensor) in made or type(tensor).__name__ == "FakeTensor" or getattr(tensor, "fake_mode", None):
            return made.get(id(tensor), tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        if type(tensor.data) is not Tensor:
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, which cannot be planned without data.")
        device = "meta" if tensor.is_meta else "cpu"
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            new: Tensor = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        vars(new).update(vars(tensor))
        made[id(tensor)] = new
        return new

    for prefix, part in module.named_modules():
        for group in (part._parameters, part._buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    group[name] = replacement(f"{prefix}.{name}" if prefix else name, tensor)


def leave_out_metrics(module: nn.Module) -> None:
    """Make torchmetrics in ``module`` do nothing: they read values, and no gradient flows from them."""
    for part in module.modules():
        if is_metric(part):
            own: Any = part
            own.forward = own.compute = lambda *_, **__: torch.zeros(())
            own.update = lambda *_, **__: None


def batch_without_data(
    batch: Batch, mode: FakeTensorMode, see: Callable[[Tensor], object] = nothing, *, parts: int = 1
) -> Batch:
    """Return a batch of the same shapes without data.

    ``see`` is called with each tensor without data. One of so many ``parts`` of its samples is kept: with 2, half of
    them.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode

    sizes = [leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    samples = sizes[0] if sizes else 0

    def convert(leaf: Any) -> Any:
        if parts > 1 and isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples:
            leaf = leaf[: samples // parts]
        copies: dict[int, Any] = {}
        # Batches of a program's own class, such as graphs, have tensors in their attributes; some cannot be copied.
        with FakeCopyMode(mode), suppress(Exception):
            leaf = copy.deepcopy(leaf, copies)
        for each in copies.values():
            if isinstance(each, Tensor):
                see(each)
        return leaf

    if parts > 1 and samples < parts:
        raise ValueError(f"a batch of {samples} samples cannot be divided into {parts} parts.")
    return map_leaves(convert, batch)


def prepare_strategy(strategy: Strategy, *, on_gpu: bool) -> None:
    """Make a strategy work in a process whose group does not exist.

    Raises:
        ValueError: the strategy cannot be planned.

    """
    strategy.simulate_one_process()
    if isinstance(strategy, MeshStrategy):
        _cut_own_chunk_only()
        _share_experts_equally()
    for name in ("state_dict", "load_state_dict"):
        # The states of generators are tensors, and there is nothing to draw.
        setattr(RandomGenerators, name, lambda *_: {})
    if isinstance(strategy, DDPStrategy):
        _all_reduce_bucket.__annotations__.clear()
        _sort_buckets(strategy.exchange_with(_all_reduce_bucket) or _BUCKET_MB)
        _keep_buckets()
    if on_gpu:
        _step_as_on_gpus()
        _attend_as_on_gpus()
    _convert_without_data()
    _read_meshes()


def note_sizes() -> list[Mapping[str, Size]]:
    """Return a list of the sizes of meshes that do not fit the number of processes, to which such sizes are added."""
    noted: list[Mapping[str, Size]] = []
    of = MeshSizes.of

    def noting(asked: Mapping[str, Size], **given: Any) -> MeshSizes:
        try:
            return of(asked, **given)
        except ValueError:
            noted.append({**asked, "expert": given.get("expert", 1)})
            raise

    setattr(MeshSizes, "of", noting)  # noqa: B010
    return noted


def _keep_buckets() -> None:
    """Make DDP keep the buckets of its constructor: to sort them by the first backward it reads a tensor."""
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        self.reducer = _Reducer(self.reducer)

    setattr(DistributedDataParallel, "__init__", __init__)  # noqa: B010


# torch's default.
_BUCKET_MB = 25


def _sort_buckets(bucket_cap_mb: float) -> None:
    """Make DDP begin with the buckets of its second step, which follow the order in which gradients are ready.

    That is taken to be the reverse of the order of the parameters.
    """
    own: Any = torch.distributed
    assign = own._compute_bucket_assignment_by_size
    limits = [own._DEFAULT_FIRST_BUCKET_BYTES, int(bucket_cap_mb * 2**20)]

    def assigned(parameters: list[Tensor], _: object, sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
        last = len(parameters) - 1
        buckets, sizes = assign(parameters[::-1], limits, sparse[::-1])
        # DDP reverses both.
        return [[last - index for index in bucket] for bucket in buckets][::-1], list(sizes)[::-1]

    own._compute_bucket_assignment_by_size = assigned


def _all_reduce_bucket(state: object, bucket: Any) -> Any:
    # Without annotations: torch compares them with the types themselves, and here they are text.
    tensor = bucket.buffer()
    torch.distributed.all_reduce(tensor)
    future: Any = torch.futures.Future()
    future.set_result(tensor)
    return future


class _Reducer:
    """DDP's reducer, which keeps its present buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _OwnChunk:
    """The chunks of ``torch.chunk``, each cut when it is used."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // count)

    def __getitem__(self, index: int) -> Tensor:
        start, whole = index * self._size, self._tensor.shape[self._dim]
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, whole - start))


def _cut_own_chunk_only() -> None:
    """Make ``fully_shard`` cut the chunk of this process only: cutting a thousand takes a thousand times as long."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    own: Any = _fsdp_param
    own._chunk_with_empty = _OwnChunk


def _share_experts_equally() -> None:
    """Let each expert get as many tokens as the others: what a router chooses is not known without data."""

    def shares(_: object, sends: Tensor, gets: Tensor, pairs: int, form: int) -> tuple[list[int], list[int], int]:
        size = len(sends)
        each = [pairs * (place + 1) // size - pairs * place // size for place in range(size)]
        return each, each, form

    setattr(ExchangedExperts, "shares", shares)  # noqa: B010
    setattr(WholeExperts, "own_pairs", lambda _, is_own, size: torch.arange(len(is_own) // size))  # noqa: B010


def _convert_without_data() -> None:
    """Make ``module.to(...)`` replace parameters: parameters without data cannot be changed in place."""
    convert = nn.Module._apply
    # Both are kept, so that the old tensor's address is not used again.
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}

    @functools.wraps(convert)
    def _apply(self: Any, function: Any, recurse: bool = True) -> Any:
        if any(is_sharded(parameter) for parameter in self._parameters.values()):
            return convert(self, function, recurse)
        for child in self.children() if recurse else ():
            child._apply(function)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                with torch.no_grad():
                    new = function(parameter)
                if new is parameter:
                    continue
                made[id(parameter)] = parameter, nn.Parameter(new, parameter.requires_grad)
            self._parameters[name] = made[id(parameter)][1]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    nn.Module._apply = _apply  # type: ignore[method-assign]


def _read_meshes() -> None:
    """Let a ``DeviceMesh`` read its tensor of ranks, which has values."""
    from torch.distributed.device_mesh import DeviceMesh

    for name in ("__init__", "__getitem__", "_flatten", "get_coordinate", "get_local_rank"):
        method = getattr(DeviceMesh, name)

        def on_values(*args: Any, method: Any = method, **kwargs: Any) -> Any:
            with on_real_tensors():
                if isinstance(ranks := kwargs.get("_rank_map"), Tensor):
                    # Made by init_device_mesh, in which a mesh counts the processes in order.
                    kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
                return method(*args, **kwargs)

        setattr(DeviceMesh, name, functools.wraps(method)(on_values))


def _step_as_on_gpus() -> None:
    """Make optimizers update all parameters together where they do so on GPUs, which takes more memory."""
    from torch.optim import optimizer

    own: Any = optimizer
    known = own._get_foreach_kernels_supported_devices
    own._get_foreach_kernels_supported_devices = lambda: [*known(), "cpu"]


def _attend_as_on_gpus() -> None:
    """Leave dropout out of attention: with it, the kernel of the CPU keeps all weights; kernels of GPUs do not."""
    attend = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(attend)
    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
    ) -> Any:
        return attend(query, key, value, attn_mask, 0.0, *more, **named)

    torch.nn.functional.scaled_dot_product_attention = without_dropout
