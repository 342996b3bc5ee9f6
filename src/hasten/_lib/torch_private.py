"""The private names of torch that hasten uses, in one file: each may change in any release of torch.

Code outside of this file uses the functions and constants below. ``tests/_lib/test_torch_private.py`` uses each of them
with the installed torch, so that a new version shows at once what it has changed.

Two kinds of names are used everywhere, because files and other libraries depend on them too: the tables of
``nn.Module`` (``_parameters``, ``_buffers``, ``_modules``) and operators (``torch._foreach_*``, ``torch.ops.aten._*``).
``optim/fast_step.py`` looks at torch's wrappers by their code, and keeps torch's own calls where it does not know them.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.optim import SGD
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from hasten._lib.observers import set_during

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.utils.data import DataLoader

    StorageInfo: TypeAlias = _StorageInfo

__all__ = ["BatchNorm", "Convolution", "NormBase", "TorchDispatchMode", "pytree", "without_modes"]

_T = TypeVar("_T")
_c10d: Any = distributed_c10d
_distributed: Any = torch.distributed


# -- modules and tensors


def inside_compiled(module: object) -> nn.Module | None:
    """Return the module within the result of ``torch.compile``; None for another object."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


# Where a module keeps the function that ``module.compile()`` has made, in its ``__dict__``.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled_by_user(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, COMPILED_CALL) is not None


def call_uncompiled(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, and not through what ``module.compile()`` has made."""
    return module._call_impl(*args, **kwargs)


def has_buffers_not_saved(module: nn.Module) -> bool:
    """Return whether a module has buffers that are not in its ``state_dict``."""
    return bool(module._non_persistent_buffers_set)


def take_versions(target: _T, state: object) -> _T:
    """Give ``target`` the versions of modules that a state dict of torch has, if it has any, and return it.

    ``_load_from_state_dict`` of a module uses its version to convert weights that an older version has saved.
    """
    if (versions := getattr(state, "_metadata", None)) is not None:
        keeper: Any = target
        keeper._metadata = versions
    return target


def with_versions(values: Mapping[str, Any], state: object) -> dict[str, Any]:
    """Return ``values`` as a state dict that has the versions of modules that ``state`` has, if it has any."""
    return take_versions(OrderedDict(values), state)


def apply_to(part: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Convert or move the tensors of a module, as ``Module.to`` and the like do."""
    part._apply(*args, **kwargs)


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before the forward of a module."""
    return list(module._forward_pre_hooks.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether hooks on the gradient of a parameter are there."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one, for autograd."""
    return bool(tensor._is_view())


def projects_one_width(attention: nn.MultiheadAttention) -> bool:
    """Return whether queries, keys and values have the same width, and one weight."""
    return bool(attention._qkv_same_embed_dim)


def attention_block(layer: type[nn.Module]) -> Any:
    """Return the method with which a kind of ``nn.TransformerEncoderLayer`` computes its attention."""
    own: Any = layer
    return own._sa_block


def identity_of(storage: torch.UntypedStorage | torch.TypedStorage) -> int:
    """Return a number that all tensors on the same memory share while it lives."""
    return int(storage._cdata)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a ``DTensor`` that this process has, without an operation; another tensor unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def operator_name(operator: Any) -> str:
    """Return the name of an operator with its namespace, such as ``"aten::add"``."""
    return str(operator._schema.name)


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments; none for another callable."""
    schema = getattr(operator, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def forget_that_it_was_sharded(module: nn.Module) -> None:
    """Remove torch's note that a module is sharded, so that ``fully_shard`` accepts it again."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    states.pop(module, None)


# -- autograd and modes


def is_in_backward() -> bool:
    """Return whether autograd computes a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_transformed() -> bool:
    """Return whether ``torch.func`` or forward-mode differentiation is active."""
    return bool(forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def is_observed() -> bool:
    """Return whether a mode sees every operation, or ``torch.jit.trace`` records them."""
    return bool(torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing())


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data because a ``FakeTensorMode`` made it."""
    from torch._subclasses import fake_tensor

    return bool(fake_tensor.is_fake(tensor))


# -- optimizers and schedulers


def note_step(optimizer: Any) -> None:
    """Record that an optimizer has stepped, or that its step was skipped on purpose, so that schedulers do not warn."""
    optimizer._opt_called = True


def is_wrapped_by_scheduler(step: object) -> bool:
    """Return whether a scheduler has wrapped this ``step``, to notice its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_wrapped_by_scheduler(step: Any) -> None:
    """Keep schedulers from wrapping a ``step`` that records its calls itself."""
    step._wrapped_by_lr_sched = True


def unscales_itself(optimizer: object) -> bool:
    """Return whether an optimizer divides its gradients by the factor of a ``GradScaler`` in its step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) is True


def set_fused(optimizer: Any, fused: bool) -> None:
    """Tell a ``GradScaler`` and the optimizer itself whether its steps are fused: such a step unscales by itself."""
    optimizer._step_supports_amp_scaling = fused
    optimizer._need_device_dtype_check_for_fused = True


def begin_momentum_at_zero(optimizer: SGD) -> None:
    """Give parameters that have no momentum yet a buffer of zeros before a fused step, which then is the same.

    torch leaves these buffers to the kernel, which fills them in the first step of a group alone: one that a
    ``GradScaler`` skips leaves in them what the memory held, and parameters that are trained later have none.
    """
    if "_init_group" in vars(optimizer):
        return
    collect, owner = type(optimizer)._init_group, weakref.proxy(optimizer)

    def collect_with_momentum(
        group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> Any:
        has_sparse_gradients = collect(owner, group, params, grads, buffers)
        # With dampening the first step has another factor, which the kernel knows alone.
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            for index, buffer in enumerate(buffers):
                if buffer is None:
                    buffers[index] = torch.zeros_like(grads[index])
        return has_sparse_gradients

    vars(optimizer)["_init_group"] = collect_with_momentum


def chained_schedulers(scheduler: object) -> list[Any]:
    """Return the schedulers inside a ``SequentialLR`` or ``ChainedScheduler``; none of another one."""
    return list(getattr(scheduler, "_schedulers", ()))


def steps_of_scheduler(scheduler: object) -> int:
    """Return how many times a scheduler has stepped."""
    return int(getattr(scheduler, "_step_count", 1)) - 1


def set_last_rates(scheduler: Any, rates: list[float]) -> None:
    """Set what ``get_last_lr`` returns, where a scheduler has it."""
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = rates


# -- loading data


def pinned(data: Any) -> Any:
    """Return data with its tensors in pinned memory, as a ``DataLoader`` pins them."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)


def indices_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the indices of each batch of a loader, or of each sample where it does not batch."""
    own: Any = loader
    return iter(own._index_sampler)


def shut_down_workers(iterator: object) -> Callable[[], None] | None:
    """Return the method that ends the workers of a loader's iterator; None where it has none."""
    end: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
    return end


def call_when_idle(iterator: Any, function: Callable[[float], object]) -> None:
    """Have the iterator of a ``DataLoader`` with workers call ``function`` whenever it has waited in vain for a batch.

    It is called with the seconds of the wait, which ends if it raises.
    """
    take = getattr(type(iterator), "_try_get_data", None)
    if take is None:
        return
    # The iterator must not hold itself: its workers end with it.
    own, (usual_seconds,) = weakref.ref(iterator), take.__defaults__

    def try_get_data(timeout: float = usual_seconds) -> Any:
        found = take(own(), timeout)
        if not found[0]:
            function(timeout)
        return found

    iterator._try_get_data = try_get_data


def default_store() -> Any:
    """Return the store of the default process group."""
    return _c10d._get_default_store()


def part_of_store(name: str, store: Any) -> Any:
    """Return a store with its own keys on the connection of ``store``."""
    return _c10d.PrefixStore(name, store)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default process group."""
    # Public from torch 2.14 on.
    own: Any = torch.distributed
    set_it = getattr(own, "set_timeout", None) or _c10d._set_pg_timeout
    set_it(timeout)


def collectives_begun() -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield the name of each process group and the counter of its collectives; some backends' counters raise."""
    for group, name in list(_c10d._world.pg_names.items()):
        yield name, group._get_sequence_number_for_group


def flight_record() -> list[dict[str, Any]]:
    """Return what torch recorded of the last collectives of this process, the oldest first; empty without a record."""
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    entries: list[dict[str, Any]] = [] if dump is None else json.loads(dump()).get("entries") or []
    return entries


def record_memory_history(max_entries: int | None) -> None:
    """Record the last allocations on CUDA devices with the Python calls that made them; None ends it."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def dump_memory_snapshot(path: str) -> None:
    """Write what is on CUDA devices, and the recorded allocations, to a file."""
    torch.cuda.memory._dump_snapshot(path)


def record_on(device: str) -> Callable[[], bytes]:
    """Return the function that returns torch's record of the last collectives on a kind of device, a pickled dict."""
    own: Any = torch._C._distributed_c10d
    backend = _c10d._get_default_group()._get_backend(torch.device(device)).name()
    dump: Callable[[], bytes] = own._dump_nccl_trace if backend == "nccl" else own._dump_fr_trace
    # From torch 2.15 on NCCL is another backend, "nccl2", and each backend but the former "nccl" has a record here.
    if backend != "nccl" and hasattr(own, "_reset_fr_trace"):
        dump = functools.partial(own._dump_fr_trace, backend=backend)
    return dump


def groups_of_process() -> dict[ProcessGroup, Any]:
    """Return the process groups that this process is a member of."""
    groups: dict[ProcessGroup, Any] = _c10d._pg_map
    return groups


def ranks_of_group(name: str) -> list[int] | None:
    """Return the ranks of the group with this name, in their order in it; None if there is no such group."""
    try:
        ranks: list[int] = _c10d.get_process_group_ranks(_c10d._resolve_process_group(name))
    except (RuntimeError, KeyError):
        return None
    return ranks


def remove_ddp_hooks(ddp: Any) -> None:
    """Stop a ``DistributedDataParallel`` from exchanging gradients."""
    ddp._remove_autograd_hooks()


def check_ddp_exchanged(ddp: Any) -> None:
    """Raise RuntimeError if the last backward of a ``DistributedDataParallel`` has left some parameters out."""
    ddp.reducer._check_reducer_finalized()


def share_ddp_buffers(ddp: Any) -> None:
    """Give all processes the buffers of the first one, as before a forward of a ``DistributedDataParallel``."""
    ddp._assign_modules_buffers()
    if ddp.modules_buffers:
        ddp._sync_buffers()


def gradient_buckets(ddp: Any, *, alone: bool = False) -> list[list[int]] | None:
    """Return the parameters in each message of a ``DistributedDataParallel``, by number; None before its first step.

    In its first step DDP sends all gradients in one message, in the reverse order of the parameters, and in later ones
    in the order in which the first step had them. All processes call it, or with ``alone`` any of them: then they are
    known from the second step on.
    """
    key = "rebuilt_per_bucket_param_indices"
    if key not in ddp._get_ddp_logging_data():
        # What the next forward does. It is an error between forward and backward.
        reducer: Any = ddp.reducer
        with suppress(RuntimeError):
            if not alone:
                ddp._has_rebuilt_buckets |= reducer._rebuild_buckets()
            ddp.logger.set_runtime_stats_and_log()
    text: str = ddp._get_ddp_logging_data().get(key, "")
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")] if text else None


def with_gradient_buckets(buckets: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Let a ``DistributedDataParallel`` that is made in the context begin with these messages, if they fit it."""
    own = _distributed._compute_bucket_assignment_by_size

    def assigned(tensors: Sequence[Tensor], limits: Sequence[int], *more: Any) -> Any:
        if sorted(number for bucket in buckets for number in bucket) != list(range(len(tensors))):
            return own(tensors, limits, *more)
        # DDP reverses both.
        return [list(bucket) for bucket in buckets][::-1], [limits[-1]] * len(buckets)

    return set_during(_distributed, _compute_bucket_assignment_by_size=assigned)


def registered_groups(mesh: Any) -> dict[str, Any]:
    """Return the table through which a ``DeviceMesh`` refers to its process groups."""
    groups: dict[str, Any] = getattr(mesh, "_pg_registry", {})
    return groups


def group_over(mesh: Any, names: tuple[str, ...]) -> torch.distributed.ProcessGroup:
    """Return the process group over some dimensions of a ``DeviceMesh`` together."""
    group: torch.distributed.ProcessGroup = mesh[names]._flatten().get_group()
    return group


def prepare_input_of_style(style: Any) -> Callable[..., Any]:
    """Return the function with which a ``ParallelStyle`` prepares the inputs of a module."""
    prepare: Callable[..., Any] = style._prepare_input_fn
    return prepare


def shard_of_each_half(dim: int) -> Any:
    """Return the placement of a ``DTensor`` of two halves along ``dim``, each of which is sharded along it."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=2)


def is_strided(placement: object) -> bool:
    """Return whether a placement may give a process several ranges of a dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def placement_along(placement: Any, dim: int) -> Any:
    """Return how a placement divides dimension ``dim``, as the placement of a tensor of one dimension."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return _StridedShard(0, split_factor=placement.split_factor) if is_strided(placement) else Shard(0)


def has_policy(policy: object) -> bool:
    """Return whether this is an object of ``torch.distributed.fsdp.wrap`` that chooses modules."""
    return hasattr(policy, "_run_policy")


def classes_of_policy(policy: Any) -> Any:
    """Return the classes of a ``ModuleWrapPolicy``; another policy unchanged."""
    return getattr(policy, "_module_classes", policy)


def run_policy(policy: Any, module: nn.Module) -> list[nn.Module]:
    """Return the modules that a policy of ``torch.distributed.fsdp.wrap`` chooses."""
    return list(policy._run_policy(module, set(), {}))


# -- fully_shard


class ShardedPart:
    """The state of a module to which ``fully_shard`` was applied."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state: Any = module._get_fsdp_state()

    @property
    def is_root(self) -> bool | None:
        """Whether it begins the forward; None before the first forward."""
        is_root: bool | None = self._state._is_root
        return is_root

    @property
    def groups(self) -> list[Any]:
        """The groups of parameters that are gathered together: one group in torch 2.9."""
        return _groups(self._state)

    def forget_forwards(self) -> None:
        """Forget the order of the forwards, in which the next backward would gather parameters."""
        self._state._comm_ctx.post_forward_order.clear()
        for group in self.groups:
            group._post_forward_indices.clear()

    def end_backward(self) -> None:
        """Reduce the gradients that are there, as torch does at the end of each backward."""
        context = self._state._state_ctx
        # From torch 2.15 on a backward notes at its beginning who ends it.
        if getattr(context, "manual_backward_finalization_active", False) is None:
            context.manual_backward_finalization_active = context.manual_backward_finalization
        self._state._root_post_backward_final_callback()

    def begin_anew(self) -> None:
        """Forget a forward or backward that an exception has ended half-way; the gradients stay."""
        if hasattr(self._module, "reset_iter_state"):
            # From torch 2.15 on it drops the gradients, also those of batches that were complete.
            kept = [(tensor, tensor.grad) for tensor in self._tensors_with_gradients()]
            self._module.reset_iter_state()
            for tensor, gradient in kept:
                tensor.grad = gradient.to(getattr(tensor, "grad_dtype", None) or gradient.dtype)
            return
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        # torch 2.9 has no function for this. Collectives under way have ended with the exception.
        context, shared = self._state._state_ctx, self._state._comm_ctx
        shared.all_gather_state = shared.reduce_scatter_state = None
        shared.post_forward_order.clear()
        for state in context.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            for group in _groups(state):
                group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
                group._reshard_after_forward_event = group._partial_reduce_output = None
                group._post_forward_indices.clear()
                group._training_state = TrainingState.IDLE
                group._to_sharded()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False

    def _tensors_with_gradients(self) -> list[Any]:
        groups = [group for state in self._state._state_ctx.all_states for group in _groups(state)]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        shards = [parameter.sharded_param for parameter in parameters]
        # What ``no_sync`` holds back is at the whole parameters.
        whole = [getattr(parameter, "_unsharded_param", None) for parameter in parameters]
        return [tensor for tensor in (*shards, *whole) if tensor is not None and tensor.grad is not None]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def drop_gathered_gradient(parameter: Any) -> None:
    """Forget the gradient of the whole value of a parameter of ``fsdp_params``, which waits to be reduced."""
    # Before torch 2.15 it was also kept here, in another type.
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None
    whole: Tensor | None = getattr(parameter, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None


# -- files


def storage_info(file: str, offset: int, length: int) -> StorageInfo:
    """Return the place of a tensor as the index of ``torch.distributed.checkpoint`` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def is_closed(stager: Any) -> bool:
    """Return whether a ``DefaultStager`` can copy nothing more; that of torch 2.11 closes itself after each copy."""
    return not stager._state_dict_stager._deepcopy_dispatch


def allowed_globals() -> dict[str, Any]:
    """Return the classes and functions that ``torch.load(weights_only=True)`` allows by itself, by their names."""
    own: Any = torch
    found: dict[str, Any] = own._weights_only_unpickler._get_allowed_globals()
    return found


def softmax_backward(gradient: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient of what a softmax over the last dimension was of, in the memory of ``gradient``."""
    return torch._softmax_backward_data(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)


# -- what the processor can do


def cpu_multiplies_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions; others take tens of times as long as for 32 bits."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def cpu_has_amx() -> bool:
    """Return whether the CPU has units for products of small matrices of 16 bits (AMX)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def cpu_multiplies_tf32() -> bool:
    """Return whether oneDNN multiplies in TF32, which it does on CPUs with AMX-FP16."""
    has_amx = getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)()
    return bool(has_amx and torch.ops.mkldnn._is_mkldnn_fp16_supported())


# -- the compiler, which takes seconds to import


def default_compile_cache() -> str:
    """Return the folder that torch keeps its caches in, unless TORCHINDUCTOR_CACHE_DIR is set."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(default_cache_dir())


def step_marks() -> Any:
    """Return the object with ``mark_step_counter``: how often a step of CUDA graphs was marked."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    return MarkStepBox


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Mark a dimension as one that may change, unless the model fixes it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def gradients_in_graphs() -> Any:
    """Return a context in which the compiler traces ``torch.autograd.grad``; None where this torch cannot."""
    from torch._dynamo import config

    return config.patch(trace_autograd_ops=True) if hasattr(config, "trace_autograd_ops") else None


def mark_address_as_static(tensor: Tensor) -> None:
    """Tell CUDA graphs that a tensor stays where it is: a graph that changes it is recorded, and nothing is copied."""
    if not hasattr(tensor, "_dynamo_static_input_type"):
        torch._dynamo.mark_static_address(tensor)


def is_error_of_compiler(error: BaseException) -> bool:
    """Return whether the compiler itself, not the model, raised this."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def compile_counters() -> Any:
    """Return the module with the compiler's ``counters``, metrics and times."""
    from torch._dynamo import utils

    return utils


def compile_options() -> list[str]:
    """Return the options of ``torch.compile(options=...)``."""
    from torch._inductor import list_options

    return list(list_options())


def compile_modes() -> dict[str, dict[str, Any]]:
    """Return the names for ``torch.compile(mode=...)`` and the options that each stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options())


def pass_over_graphs(change: Callable[[torch.fx.Graph], None], file: str) -> dict[str, Any]:
    """Return options of ``torch.compile`` with which ``change`` gets each graph before it becomes code.

    Empty where the program has set a pass for all graphs.

    ``change`` may call ``use_one_thread``. torch caches the code that it leads to by the content of ``file``, in which
    ``change`` is written.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((file,))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, CustomGraphPass) and self.uuid() == other.uuid()

        def __hash__(self) -> int:
            return hash(self.uuid())

    if config.post_grad_custom_pre_pass is not None:
        return {}
    # The number of threads is named so that torch restores it after each graph.
    return {"post_grad_custom_pre_pass": Pass(), "cpp.threads": config.cpp.threads}


def use_one_thread() -> None:
    """Make the compiler write code for one thread, for the graph that it compiles."""
    from torch._inductor import config

    config.cpp.threads = 1


def example_of(size: int | torch.SymInt) -> int:
    """Return a size; of a symbol that of the example the compiler traced, or 0 if there was none."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def check_compiler_supported() -> None:
    """Raise a RuntimeError if ``torch.compile`` does not work with this Python or on this system."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    check_if_dynamo_supported()


def compiler_is_supported() -> bool:
    """Return whether ``check_compiler_supported`` passes."""
    with suppress(RuntimeError):
        check_compiler_supported()
        return True
    return False


def cpp_compiler() -> str:
    """Return the C++ compiler that ``torch.compile`` calls; raise what torch raises if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


# -- pipelines


def run_schedule(schedule: Any, parts: int) -> None:
    """Run a schedule of ``torch.distributed.pipelining`` on micro-batches that its stages have."""
    for kind in ("stage", "stages"):
        setattr(schedule, f"_{kind}_forward_initialized", True)
        setattr(schedule, f"_{kind}_backward_initialized", True)
    schedule._step_microbatches([()] * parts, [{}] * parts, [None] * parts, return_outputs=False)


def gradients_of_inputs(
    output: Tensor, gradient: Tensor | None, received: Tensor, parameters: list[nn.Parameter]
) -> list[Any]:
    """Compute the gradient of what a stage has received; return what ``gradients_of_parameters`` needs.

    ``output``, detached in place, has the gradient ``gradient``, None for a loss. Parameters may be those of other
    stages, too.
    """
    from torch.distributed.pipelining import _backward

    gradients = None if gradient is None else [gradient]
    groups: list[Any] = _backward.stage_backward_input([output], gradients, [received], iter(parameters))[1]
    return groups


def gradients_of_parameters(parameters: list[nn.Parameter], groups: list[Any]) -> None:
    """Compute the gradients of the parameters of a stage, after ``gradients_of_inputs``."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(parameters), groups)
