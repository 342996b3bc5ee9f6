"""Each private name of torch that hasten uses is there, and does what it is used for. Run it with a new torch first."""

from __future__ import annotations

import ast
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs import ROOT, fork_python
from tests.rules.trees import nodes
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten._lib import torch_private

# Files that use private names of torch themselves, and why.
ELSEWHERE = {
    "hasten/optim/fast_step.py": "compares torch's wrappers with what it knows, and calls torch where they differ",
    "hasten_xla/strategies.py": "runs when a backward ends, for XLA alone",
    "hasten_tools/plan/simulated.py": "replaces functions of torch to simulate processes and GPUs",
    "hasten_tools/plan/step.py": "names the errors of fake tensors",
    "hasten_tools/speed/trial.py": "asks whether CUDA can be used after a fork",
    "hasten_lightning/internals/compiled.py": "has a class of torch in a signature of Lightning's",
    "hasten_lightning/internals/modules.py": "passes on what torch has for checkpointed activations",
}


def private_names_of_torch(path: Path) -> list[str]:
    """Return each import of a private module or name of torch, and each ``torch.a._b``, but for operators."""
    found: list[str] = []

    def note(node: ast.AST, name: str) -> None:
        operators = ("torch._foreach", "torch.ops.aten.")
        private = [part for part in name.split(".") if part.startswith("_") and not part.endswith("__")]
        if private and not name.startswith(operators):
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)} {name}")

    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                note(node, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    note(node, alias.name)
        elif isinstance(node, ast.Attribute) and _begins_with_torch(node):
            name = ast.unparse(node)
            if name.replace(".", "").replace("_", "").isalnum():
                note(node, name)
    return found


def _begins_with_torch(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def test_no_other_file_uses_private_names_of_torch() -> None:
    source = ROOT / "src"
    found = {
        path.relative_to(source).as_posix(): names
        for path in source.rglob("*.py")
        if path != Path(torch_private.__file__) and (names := private_names_of_torch(path))
    }
    assert {path: names for path, names in found.items() if path not in ELSEWHERE} == {}
    assert set(ELSEWHERE) <= set(found), "files that need not be listed"


def test_modules() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Conv1d(1, 1, 1))
    assert isinstance(model[0], torch_private.BatchNorm)
    assert isinstance(model[0], torch_private.NormBase)
    assert isinstance(nn.InstanceNorm1d(2), torch_private.NormBase)
    assert isinstance(model[1], torch_private.Convolution)
    assert torch_private.forward_pre_hooks(model) == []
    model.register_forward_pre_hook(print)
    assert torch_private.forward_pre_hooks(model) == [print]
    assert not torch_private.has_buffers_not_saved(model[0])
    model[0].register_buffer("here", torch.ones(1), persistent=False)
    assert torch_private.has_buffers_not_saved(model[0])


def test_compiled_modules() -> None:
    layer = nn.Linear(2, 2)
    assert torch_private.inside_compiled(layer) is None
    assert torch_private.inside_compiled(3) is None
    assert torch_private.inside_compiled(torch.compile(layer)) is layer
    assert not torch_private.is_compiled_by_user(layer)
    x = torch.ones(1, 2)
    plain = layer(x)
    layer.compile(backend=lambda graph, _: pytest.fail("compiled"))
    assert torch_private.is_compiled_by_user(layer)
    assert torch.equal(torch_private.call_uncompiled(layer, x), plain)
    vars(layer)[torch_private.COMPILED_CALL] = lambda *_: "compiled"
    assert layer(x) == "compiled"


def test_tensors_and_parameters() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hooks(weight)
    handle = weight.register_hook(lambda gradient: gradient)
    assert torch_private.has_gradient_hooks(weight)
    handle.remove()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.has_gradient_hooks(weight)
    x = torch.ones(4)
    assert torch_private.is_view(x[:2])
    assert not torch_private.is_view(x)
    assert torch_private.identity_of(x[:2].untyped_storage()) == torch_private.identity_of(x.untyped_storage())
    assert torch_private.identity_of(x.clone().untyped_storage()) != torch_private.identity_of(x.untyped_storage())
    assert torch_private.local_part(x) is x
    leaves, structure = torch_private.pytree.tree_flatten({"a": [x, 1]})
    assert torch_private.pytree.tree_unflatten(leaves, structure) == {"a": [x, 1]}


def test_operators() -> None:
    assert torch_private.argument_names(torch.ops.aten.add.Tensor) == ["self", "other", "alpha"]
    assert torch_private.argument_names(print) == []
    assert torch_private.operator_name(torch.ops.aten.add.Tensor) == "aten::add"
    assert torch_private.projects_one_width(nn.MultiheadAttention(4, 2))
    assert not torch_private.projects_one_width(nn.MultiheadAttention(4, 2, kdim=3))
    kind = nn.TransformerEncoderLayer
    assert torch_private.attention_block(kind) is torch_private.attention_block(type("Sub", (kind,), {}))
    assert torch_private.attention_block(type("Own", (kind,), {"_sa_block": print})) is print


def test_modes_and_autograd() -> None:
    seen: list[bool] = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(True)
            return func(*args, **kwargs or {})

    assert not torch_private.is_observed()
    with Mode():
        assert torch_private.is_observed()
        torch.ones(1)
        assert seen == [True]
        with torch_private.without_modes():
            assert not torch_private.is_observed()
            torch.ones(1)
    assert seen == [True]

    assert not torch_private.is_transformed()
    inside = []
    torch.func.vmap(lambda x: inside.append(torch_private.is_transformed()) or x)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        inside.append(torch_private.is_transformed())
    assert inside == [True, True]

    assert not torch_private.is_in_backward()
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: inside.append(torch_private.is_in_backward()))
    x.sum().backward()
    assert inside[2:] == [True]


def test_tensors_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch_private.is_fake(torch.ones(1))
    assert not torch_private.is_fake(torch.ones(1))


def test_optimizers_and_schedulers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert not torch_private.is_wrapped_by_scheduler(optimizer.step)
    first, second = (lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    assert torch_private.is_wrapped_by_scheduler(optimizer.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.note_step(optimizer)
        first.step()
    assert torch_private.steps_of_scheduler(first) == 1
    torch_private.set_last_rates(first, [0.25])
    assert first.get_last_lr() == [0.25]
    chained = lr_scheduler.ChainedScheduler([first, second])
    assert torch_private.chained_schedulers(chained) == [first, second]
    assert torch_private.chained_schedulers(first) == []

    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    step = functools.partial(other.step)
    torch_private.mark_as_wrapped_by_scheduler(step)
    other.step = step  # type: ignore[method-assign]
    lr_scheduler.StepLR(other, 1)
    assert other.step is step


def test_fused_optimizers_unscale() -> None:
    fused = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert torch_private.unscales_itself(fused)
    assert not torch_private.unscales_itself(plain)
    torch_private.set_fused(plain, True)
    assert torch_private.unscales_itself(plain)


def test_momentum_of_a_fused_step_begins_at_zero() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.5, fused=True)
    torch_private.begin_momentum_at_zero(optimizer)
    for trained in (weights[:1], weights):
        sum(trained, torch.zeros(1)).backward()
        optimizer.step()
    assert optimizer.state[weights[0]]["momentum_buffer"].item() == 2.5
    assert optimizer.state[weights[1]]["momentum_buffer"].item() == 1


class Asking(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        info: Any = torch.utils.data.get_worker_info()
        return None if info is None else info.id


def test_loaders() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    assert list(torch_private.indices_of(loader)) == [[0, 1], [2, 3]]
    assert list(torch_private.indices_of(DataLoader(loader.dataset, batch_size=None))) == [0, 1, 2, 3]
    assert torch_private.shut_down_workers(iter(loader)) is None
    workers: Any = iter(DataLoader(Asking(), batch_size=None, num_workers=1))
    waits: list[float] = []
    torch_private.call_when_idle(workers, waits.append)
    assert [next(workers), next(workers)] == [0, 0]
    assert workers._try_get_data(0.01) == (False, None)
    assert 0.01 in waits
    torch_private.call_when_idle(iter(loader), waits.append)  # Without workers, nothing waits.
    end = torch_private.shut_down_workers(workers)
    assert end is not None
    end()


PROCESSES = """
import pickle
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, CustomPolicy
from hasten._lib import torch_private
from hasten.strategies.mesh import schedule

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch_private.set_timeout(timedelta(seconds=60))
store = torch_private.part_of_store("part", torch_private.default_store())
store.set("a", "b")
assert store.get("a") == b"b" and torch_private.default_store().check(["a"]) is False
dist.all_reduce(torch.ones(1))
counts = {name: count() for name, count in torch_private.collectives_begun()}
assert list(counts.values()) == [1], counts
assert torch_private.groups_of_process()[dist.group.WORLD][0] == "gloo"
assert torch_private.ranks_of_group(next(iter(counts))) == [0] and torch_private.ranks_of_group("sum") is None

(record,) = torch_private.flight_record()
assert record["profiling_name"] == "gloo:all_reduce" and record["collective_seq_id"] == 1, record
(same,) = pickle.loads(torch_private.record_on("cpu")())["entries"]
assert same["profiling_name"] == "gloo:all_reduce" and same["collective_seq_id"] == 1, same
assert record["process_group"][1] == "default_pg" and record["input_sizes"] == [[1]], record

exchanged = []
ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
ddp.register_comm_hook(None, lambda state, bucket: exchanged.append(1) or bucket_of(bucket))
def bucket_of(bucket):
    future = torch.futures.Future(); future.set_result(bucket.buffer()); return future
torch_private.remove_ddp_hooks(ddp)
ddp.module(torch.ones(1, 2)).sum().backward()
assert exchanged == []
torch_private.share_ddp_buffers(ddp)
torch_private.share_ddp_buffers(nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2)))
ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
assert torch_private.gradient_buckets(ddp) is None
ddp(torch.ones(1, 2)).sum().backward()
(bucket,) = torch_private.gradient_buckets(ddp)
assert sorted(bucket) == [0, 1]
with torch_private.with_gradient_buckets([[1], [0]]):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
assert len(ddp.reducer._get_zeros_like_grad_buckets()) == 2
with torch_private.with_gradient_buckets([[7]]):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
assert len(ddp.reducer._get_zeros_like_grad_buckets()) == 1

mesh = init_device_mesh("cpu", (1,))
assert isinstance(torch_private.registered_groups(mesh), dict)
style = ColwiseParallel()
assert callable(torch_private.prepare_input_of_style(style))
packed = torch_private.shard_of_each_half(1)
assert torch_private.is_strided(packed) and not torch_private.is_strided(Shard(1))
assert torch_private.placement_along(packed, 0) == Replicate() == torch_private.placement_along(Replicate(), 0)
assert torch_private.placement_along(Shard(1), 1) == Shard(0)
alone = torch_private.placement_along(packed, 1)
whole = torch.arange(8).view(2, 4)
assert torch.equal(distribute_tensor(whole, mesh, [packed]).full_tensor(), whole)
assert torch.equal(distribute_tensor(torch.arange(4), mesh, [alone]).to_local(), torch.arange(4))

model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
policy = ModuleWrapPolicy({nn.Linear})
assert torch_private.has_policy(policy) and not torch_private.has_policy(print)
assert set(torch_private.classes_of_policy(policy)) == {nn.Linear} and torch_private.classes_of_policy(print) is print
assert torch_private.run_policy(CustomPolicy(lambda part: isinstance(part, nn.Linear)), model) == [model[0]]

fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
root, part = torch_private.ShardedPart(model), torch_private.ShardedPart(model[0])
assert root.is_root is None
loss = model(torch.ones(1, 2)).sum()
assert root.is_root is True and part.is_root is False
assert len(part.groups) == 1
assert torch_private.local_part(model[0].weight).shape == (2, 2)
root.begin_anew()
model(torch.ones(1, 2)).sum().backward()
first = model[0].weight.grad.clone()
model.zero_grad()
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()
assert model[0].weight.grad is None
torch_private.drop_gathered_gradient(part.groups[0].fsdp_params[0])
model(torch.ones(1, 2)).sum().backward()
model.set_requires_gradient_sync(True)
root.end_backward()
assert torch.equal(model[0].weight.grad.to_local(), first.to_local())
with torch.no_grad():
    model(torch.ones(1, 2))
root.forget_forwards()
torch_private.forget_that_it_was_sharded(model)
fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)

layer, passed = nn.Linear(2, 1), []
for name in ("GPipe", "LoopedBFS"):
    order = schedule.Schedule(name, 1, 1, 2, "")
    step = lambda *at: passed.append(at) or layer(torch.ones(2))
    stage = schedule.Stage(0, order, dist.group.WORLD, torch.device("cpu"), step, [])
    stage.begin([None, None], sends_headers=False)
    torch_private.run_schedule(order.make([stage], 2), 2)
assert passed == [(0, 0, None), (0, 1, None)] * 2 and layer.bias.grad == 4
dist.destroy_process_group()
print("done")
"""


def test_processes(tmp_path: Path) -> None:
    done = fork_python("-c", PROCESSES, tmp_path / "meeting", cwd=tmp_path)
    assert "done" in done.stdout, done.stderr[-3000:]


def test_backward_in_two_parts() -> None:
    layer, received = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    groups = torch_private.gradients_of_inputs(layer(received), torch.ones(1, 2), received, list(layer.parameters()))
    assert layer.weight.grad is None
    assert torch.equal(received.grad, layer.weight.detach().sum(0, keepdim=True))
    torch_private.gradients_of_parameters(list(layer.parameters()), groups)
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    assert torch.equal(layer.bias.grad, torch.ones(2))


def test_files_and_the_processor() -> None:
    allowed = torch_private.allowed_globals()
    assert "torch._utils._rebuild_tensor_v2" in allowed
    info = torch_private.storage_info("file", 1, 2)
    assert (info.relative_path, info.offset, info.length) == ("file", 1, 2)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    assert not torch_private.is_closed(stager)
    stager.close()
    assert torch_private.is_closed(stager)
    scores = torch.randn(2, 5, requires_grad=True)
    probabilities = scores.softmax(-1)
    gradient = torch.randn(2, 5)
    (expected,) = torch.autograd.grad(probabilities, scores, gradient)
    assert torch.equal(torch_private.softmax_backward(gradient, probabilities.detach()), expected)
    assert isinstance(torch_private.cpu_multiplies_bfloat16(), bool)
    assert isinstance(torch_private.cpu_multiplies_tf32(), bool)
    assert isinstance(torch_private.cpu_has_amx(), bool)


def test_the_compiler() -> None:
    assert torch_private.default_compile_cache()
    assert isinstance(torch_private.step_marks().mark_step_counter, int)
    assert "max_autotune" in torch_private.compile_options()
    assert "max-autotune" in torch_private.compile_modes()
    torch_private.check_compiler_supported()
    torch_private.mark_dynamic(torch.ones(2, 2), 0)
    fixed = torch.ones(2)
    torch_private.mark_address_as_static(fixed)
    assert hasattr(fixed, "_dynamo_static_input_type")
    with torch_private.gradients_in_graphs():
        assert torch._dynamo.config.trace_autograd_ops
    assert not torch_private.is_error_of_compiler(RuntimeError())
    assert torch_private.is_error_of_compiler(torch._dynamo.exc.TorchDynamoException())
    counters = torch_private.compile_counters()
    assert {"stats", "inductor"} <= set(counters.counters) | {"stats", "inductor"}
    assert isinstance(counters.get_compilation_metrics(), (list, tuple))
    assert isinstance(counters.calculate_time_spent(), dict)
    assert isinstance(torch_private.cpp_compiler(), str)
