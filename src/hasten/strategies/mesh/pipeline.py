"""Pipelines: each process computes some of the layers, and the micro-batches of a batch go from process to process."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.observers import set_during
from hasten._lib.tree import by_kind, is_sharded, leaves, map_tensors, move_to, weighed, whole
from hasten.batching.split import join, measure, split
from hasten.strategies.mesh.blocks import is_manual, name_of
from hasten.strategies.mesh.schedule import Schedule, Stage, check_stage_tensor
from hasten.strategies.mesh.sizes import PIPELINE, TENSOR
from hasten.strategies.mesh.stages import Stages
from hasten.strategies.sharded import local_part, roots_of, total_norm

if TYPE_CHECKING:
    from hasten.strategies.mesh.strategy import MeshStrategy


class LogCall(NamedTuple):
    """One call of ``self.log``."""

    # The name of the module that logs.
    module: str
    arguments: dict[str, Any]
    # What means count in this process; None for as much as in the others.
    weight: Tensor | None


# Methods of a strategy that all processes have to call.
_COLLECTIVE = ("all_gather", "all_reduce", "barrier", "broadcast", "gather_objects")


@dataclass
class _Results:
    """What the last stage has computed, for all stages."""

    output: Any = None  # What the step returns, with the loss of a training step apart.
    loss: Tensor | None = None  # The loss of a training step, a tensor of one element.
    weight: Tensor | None = None  # The sum of "loss_weight" over the micro-batches; None if the step returns none.
    calls: list[LogCall] = field(default_factory=list)  # The calls of ``self.log``.


@dataclass
class _Metric:
    """A metric on its way to another process: its name in the module, and its last value."""

    name: str
    value: Any


@dataclass
class _Batch:
    """A batch of training that goes through the stages."""

    function: Callable[..., Any]  # The step of the user's module.
    parts: list[tuple[Any, ...]]  # The arguments of the step for each micro-batch.
    sizes: list[int]  # The samples of each.
    outputs: list[dict[str, Any]] = field(default_factory=list)  # What the last stage has returned, without graphs.
    # The calls of ``self.log`` in the last stage, with the place of the micro-batch.
    calls: list[tuple[int, LogCall]] = field(default_factory=list)
    logged: list[LogCall] = field(default_factory=list)  # Those of the micro-batch in hand.


class Pipeline:
    """Computes the steps of a module whose layers are in several processes.

    ``MeshStrategy`` makes it, ``divide`` gives each process its layers, and the steps that ``step`` returns take the
    place of the user's.

    Raises:
        ValueError: the arguments contradict each other.

    """

    def __init__(
        self,
        strategy: MeshStrategy,
        processes: int,
        *,
        schedule: str,
        split: Sequence[str] | None,
        micro_batches: int | None,
    ) -> None:
        self._strategy, self._owner = strategy, strategy.owner
        self.processes = processes
        self.arguments: dict[str, Any] = {"schedule": schedule, "split": split, "micro_batches": micro_batches}
        stages = None if split is None else len(split) + 1
        self.schedule = Schedule(schedule, processes, stages, micro_batches, self._owner)
        # The module that is divided: no one at first.
        self._module = nn.Module()
        self._stages: Stages
        self._rank = 0
        # The micro-batches of the last batch of training.
        self.parts = 0
        # Whether there are no other processes, see ``simulate_one_process``.
        self._is_alone = False
        self._batch: _Batch | None = None
        # See ``weighing``.
        self._weight: Tensor | None = None
        # The gradients of the last batch.
        self._found: list[tuple[nn.Parameter, Tensor]] = []

    def divide(self, module: nn.Module, shard: Callable[[], None]) -> None:
        """Give this process the layers of its stages; ``shard`` divides what is left over further processes.

        Raises:
            ValueError: the module cannot be divided.

        """
        if self._module is module:
            shard()
            return
        self._module, device = module, self._strategy.root_device
        self._rank = self._strategy.device_mesh.get_local_rank(PIPELINE)
        self._group = self._strategy.device_mesh.get_group(PIPELINE)
        mine = self.schedule.stages_of(self._rank)
        sequences = self._strategy.device_mesh[TENSOR] if self._strategy.divides_activations else None
        self._stages = stages = Stages(
            module, self.schedule.stages, self.arguments["split"], mine, self._owner, sequences
        )
        stages.leave_out(module, device)
        shard()
        stages.divide_forward()
        self._forward = self._strategy.engine.as_forward(stages.run, module)
        parameters = list(module.parameters())
        self._own = {
            index: Stage(index, self.schedule, self._group, device, self._compute, parameters) for index in mine
        }
        self._schedules: dict[int, Any] = {}
        self._seen: set[Any] = set()
        self._loggers = [name for name, part in module.named_modules() if hasattr(part, "log_dict")]
        kind: Any = type(module)
        self._signature = inspect.signature(kind.log) if self._loggers else None
        self._several = [
            (parameter, holders)
            for name, parameter in module.named_parameters()
            if len(holders := self._holders(name)) > 1 and self._rank in holders
        ]
        if not self._is_alone:
            # Processes connect now, all at once.
            dist.barrier(self._group)

    def simulate_one_process(self) -> None:
        """Compute the stages of one process while no other exists: what it gets has the right shape, and no values."""
        self._is_alone = True

    def check(self, module: nn.Module) -> bool:
        """Return whether the module has been divided before.

        Raises:
            ValueError: its steps cannot be computed in stages.

        """
        if self._module is module:
            return True
        if not hasattr(module, "training_step"):
            raise self._refused(
                f"{name_of(module)} has no training_step.",
                "Pipelines are for the Trainer; examples/pipeline_parallel.py is a loop with Fabric.",
            )
        if is_manual(module):
            raise self._refused(
                f"{name_of(module)} optimizes manually, and the stages compute backward.", "Use automatic optimization."
            )
        if any(parameter.is_meta for parameter in module.parameters()):
            raise self._refused(
                f"{name_of(module)} is on the meta device.", "Make it on the CPU: each process keeps its stages."
            )
        if any(map(is_sharded, module.parameters())):
            raise self._refused(
                f"{name_of(module)} has divided its layers itself, also those of other stages.", "Use shard= and plan=."
            )
        return False

    def _refused(self, what: str, fix: str) -> Exception:
        return MisconfigurationException(f"{self._owner}(pipeline={self.processes}): {what}", fix=fix)

    # -- a step

    def step(
        self, function: Callable[..., Any], *, trains: bool, weighing: Callable[[Tensor], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Return a step that computes forward on all stages, and with ``trains``, if it returns a loss, backward.

        Logged means count by a weight in the context that ``weighing`` returns.
        """
        compute = self._train if trains else self._evaluate

        @functools.wraps(function)
        def on_stages(batch: Any, *arguments: Any) -> Any:
            results = self._shared(compute(function, batch, arguments))
            for call in results.calls:
                part: Any = self._module.get_submodule(call.module)
                with nullcontext() if call.weight is None else weighing(call.weight):
                    part.log(**call.arguments)
            return self._deferred(results) if trains else results.output

        return on_stages

    def weighing(self, weight: Tensor) -> AbstractContextManager[None]:
        """Note the weight of means that a step logs, for when all stages log them."""
        return set_during(self, _weight=weight)

    def _train(self, function: Callable[..., Any], batch: Any, arguments: Sequence[Any]) -> _Results:
        module, strategy = self._module, self._strategy
        parts = split(batch, self.schedule.part_size(measure(batch)))
        self._batch = _Batch(function, [(part, *arguments) for part, _ in parts], [count for _, count in parts])
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._begin(module, self._batch)
        self.parts = len(parts)
        if len(parts) not in self._schedules:
            self._schedules[len(parts)] = self.schedule.make([*self._own.values()], len(parts))
        # Gradients of earlier batches are put aside: what this batch adds is reduced, and scaled in backward.
        earlier = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        try:
            with torch.enable_grad(), self._unreduced(module), self._watched(self._batch.logged):
                torch_private.run_schedule(self._schedules[len(parts)], len(parts))
            self._stages.check_gradients()
            strategy.engine.sync_gradients(module)
            self._sum_shared()
            self._found = [(parameter, parameter.grad) for parameter in trained if parameter.grad is not None]
        finally:
            for parameter, gradient in zip(trained, earlier, strict=True):
                parameter.grad = gradient
        return self._joined() if self._is_last else _Results()

    def _begin(self, module: nn.Module, batch: _Batch) -> None:
        """Tell the stages of this process what the micro-batches look like."""
        flags = hash(tuple(parameter.requires_grad for parameter in module.parameters()))
        kinds: list[Hashable] = [(_kind(part), flags) for part in batch.parts]
        is_new = not self._seen.issuperset(kinds)
        for stage in self._own.values():
            stage.begin(kinds, sends_headers=is_new and not self._is_alone)
            if is_new and self._is_alone and not stage.is_first:
                like = self._strategy.engine.as_forward(self._stages.input_of, module)
                for kind, part in zip(kinds, batch.parts, strict=True):
                    tensor = like(stage.stage_index, batch.function, part)
                    check_stage_tensor(tensor, self._owner)
                    stage.expect(kind, tensor)
        self._seen.update(kinds)

    @property
    def _is_last(self) -> bool:
        """Whether this process has the last stage."""
        return self.schedule.stages - 1 in self._own

    def _compute(self, stage: int, place: int, received: Tensor | None) -> Tensor:
        """Compute a micro-batch: return the activations for the next stage, or a part of the loss of the batch."""
        assert self._batch is not None
        batch = self._batch
        batch.logged.clear()
        output = self._forward(stage, received, batch.function, batch.parts[place])
        if stage < self.schedule.stages - 1:
            check_stage_tensor(output, self._owner)
            activations: Tensor = output
            return activations
        batch.calls += [(place, call) for call in batch.logged]
        rest = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss = rest.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise make_error(
                RuntimeError,
                f"training_step returned {'None' if loss is None else type(loss).__name__} with "
                f"strategy={self._strategy.name!r}: every stage takes part in the backward of the others.",
                fix="Return the loss, or 0 * loss.",
            )
        batch.outputs.append(_detached(rest))
        weight = rest.get("loss_weight")
        return whole(loss).reshape(()) * (batch.sizes[place] / sum(batch.sizes) if weight is None else weight)

    def _joined(self) -> _Results:
        """Return the results of all micro-batches as those of the batch."""
        assert self._batch is not None
        batch, self._batch = self._batch, None
        weights = [output.pop("loss_weight", None) for output in batch.outputs]
        losses = torch.stack([output.pop("loss").reshape(()) for output in batch.outputs])
        results = _Results(calls=_joined_calls(batch.calls, batch.sizes))
        if any(weight is None for weight in weights):
            shares = torch.tensor(batch.sizes, dtype=losses.dtype, device=losses.device)
            results.loss = (losses * shares).sum() / sum(batch.sizes)
        else:
            each = torch.stack([torch.as_tensor(weight, device=losses.device).reshape(()) for weight in weights])
            results.weight = each.sum()
            results.loss = (losses * each).sum() / results.weight
        if batch.outputs[0]:
            results.output = join(batch.outputs, batch.sizes)
        return results

    def _evaluate(self, function: Callable[..., Any], batch: Any, arguments: Sequence[Any]) -> _Results:
        """Compute a step of the whole batch, one stage after the other."""
        local: Tensor | None = None
        results = _Results()
        sent: list[Any] = []
        for index, stage in self._own.items():
            stage.begin([None], sends_headers=True)
            received = local
            if index and received is None:
                received = stage.receive_header(None)
                dist.recv(received, group=self._group, group_src=self.schedule.process_of[index - 1])
            calls: list[LogCall] = []
            with self._watched(calls):
                output = self._forward(index, received, function, (batch, *arguments))
            local = None
            if stage.is_last:
                results = _Results(output, calls=calls)
                continue
            check_stage_tensor(output, self._owner)
            if index + 1 in self._own:
                local = output
            else:
                sent += [
                    operation.op(operation.tensor, group=self._group, group_dst=operation.group_peer)
                    for operation in stage.send_ops(output)
                ]
        for work in sent:
            work.wait()
        return results

    def _deferred(self, results: _Results) -> Any:
        """Return what the step returns, with a loss whose backward adds the gradients that are computed already."""
        assert results.loss is not None
        anchor = torch.zeros((), dtype=results.loss.dtype, device=results.loss.device, requires_grad=True)
        loss = _Computed.apply(anchor, results.loss, partial(self._add_gradients, results.weight))
        if results.output is None and results.weight is None:
            return loss
        weight = {} if results.weight is None else {"loss_weight": results.weight}
        return {"loss": loss, **weight, **(results.output or {})}

    def _add_gradients(self, weight: Tensor | None, factor: Tensor) -> None:
        """Add the gradients of the batch, times a factor, to those of the parameters.

        With weights they are those of the sum over samples, and without those of their mean.
        """
        factor = factor if weight is None else factor / weight.to(factor)
        for alike in by_kind([local_part(gradient) for _, gradient in self._found]):
            torch._foreach_mul_(alike, factor.to(alike[0]))
        for parameter, gradient in self._found:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._found = []

    @contextmanager
    def _unreduced(self, module: nn.Module) -> Iterator[None]:
        """Keep the gradients of micro-batches in the process."""
        roots = roots_of(module)
        for root in roots:
            root.set_requires_gradient_sync(False)
            # Other micro-batches are on their way.
            root.set_is_last_backward(False)
        try:
            yield
        finally:
            for root in roots:
                root.set_is_last_backward(True)
                root.set_requires_gradient_sync(True)

    # -- what the last stage shares with the others

    @contextmanager
    def _watched(self, calls: list[Any]) -> Iterator[None]:
        """Keep calls of ``self.log``, which all stages make when the step is over; refuse exchanges between processes.

        Only the last stage computes to the end of a step.
        """
        own = vars(self._strategy)
        parts = [(name, vars(self._module.get_submodule(name))) for name in self._loggers]

        def log(module: str, *args: Any, **kwargs: Any) -> None:
            assert self._signature is not None
            given = dict(self._signature.bind(None, *args, **kwargs).arguments)
            del given["self"]
            given["value"] = _detached(given["value"])
            if not isinstance(given.get("reduce_fx", ""), str):
                raise self._refused(
                    f"self.log({given['name']!r}, reduce_fx={given['reduce_fx']!r}): a function cannot be sent.",
                    "Use 'mean', 'sum', 'max' or 'min'.",
                )
            calls.append(LogCall(module, given, self._weight))

        def refuse(name: str, *args: Any, **kwargs: Any) -> None:
            raise self._refused(
                f"a step calls {name}(), and only the processes of the last stage would reach it.",
                "Call it in a hook, such as on_train_batch_end().",
            )

        for name, attributes in parts:
            attributes["log"] = partial(log, name)
        own |= {name: partial(refuse, name) for name in _COLLECTIVE}
        try:
            yield
        finally:
            for _, attributes in parts:
                del attributes["log"]
            for name in _COLLECTIVE:
                del own[name]

    def _shared(self, results: _Results) -> _Results:
        """Return the results of the last stage on all stages."""
        if self._is_alone:
            return results if self._is_last else _Results(loss=torch.zeros(()))
        box: list[Any] = [None]
        if self._is_last:
            calls = [call._replace(arguments=self._named_metric(call.arguments)) for call in results.calls]
            sent = (results.output, results.loss, results.weight, calls)
            box = [move_to(_detached(sent), "cpu")]
        source, device = self.schedule.process_of[-1], self._strategy.root_device
        dist.broadcast_object_list(box, group=self._group, group_src=source, device=device)
        if self._is_last:
            return results
        output, loss, weight, calls = move_to(box[0], device)
        logged = [call._replace(arguments=self._found_metric(call.arguments)) for call in calls]
        return _Results(output, loss, weight, logged)

    def _named_metric(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of ``self.log``, with the name of a metric and its last value in its place."""
        value = given["value"]
        if not isinstance(value, nn.Module):
            return given
        name = next((name for name, part in self._module.named_modules() if part is value), None)
        if name is None:
            raise self._refused(
                f"self.log({given['name']!r}, {name_of(value)}): the metric is no attribute of the module.",
                "Make it in __init__().",
            )
        return {**given, "value": _Metric(name, value._forward_cache)}

    def _found_metric(self, given: dict[str, Any]) -> dict[str, Any]:
        value = given["value"]
        if not isinstance(value, _Metric):
            return given
        metric: Any = self._module.get_submodule(value.name)
        # What the metric has gathered stays in the last stage: the processes join it when they compute.
        metric._forward_cache = value.value
        return {**given, "value": metric}

    # -- gradients

    def _sum_shared(self) -> None:
        """Add up the gradients of parameters that several stages have, such as an output layer of the embedding."""
        for parameter, (first, *others) in self._several:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient: Any = parameter.grad
            like: Any = parameter
            if is_sharded(like) and gradient.placements != like.placements:
                # An embedding that is split by words leaves a sum for each process of its group.
                gradient = parameter.grad = gradient.redistribute(placements=like.placements)
            mine = local_part(gradient)
            if self._rank != first:
                dist.send(mine, group=self._group, group_dst=first)
                dist.recv(mine, group=self._group, group_src=first)
                continue
            for other in others:
                part = torch.empty_like(mine)
                dist.recv(part, group=self._group, group_src=other)
                mine.add_(part)
            for other in others:
                dist.send(mine, group=self._group, group_dst=other)

    def _holders(self, name: str) -> list[int]:
        """Return the processes that have a parameter or buffer, of one pipeline."""
        stages = self._stages.owners.get(name, (0,))
        return sorted({self.schedule.process_of[stage] for stage in stages})

    def norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of all stages; a parameter of several counts once."""
        later = {id(parameter) for parameter, holders in self._several if holders[0] != self._rank}
        gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in later]
        own = total_norm(gradients, norm_type).to(self._strategy.root_device)
        if math.isinf(norm_type):
            highest = own.double()
            dist.all_reduce(highest, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group=self._group)
            return highest
        powers = own.double() ** norm_type
        dist.all_reduce(powers, group=self._group)
        return powers ** (1 / norm_type)

    # -- checkpoints

    def first_has(self, name: str) -> bool:
        """Return whether this process is the first of its pipeline that has a parameter or buffer."""
        return self._holders(name)[0] == self._rank

    def together(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all stages in the first process, and none in others; all processes call it."""
        if not self._strategy.keeps_whole:
            return {}
        device = self._strategy.root_device
        tensors: list[Tensor] = [leaf for leaf in leaves(entries) if isinstance(leaf, Tensor)]
        plan = map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), entries)
        plans: list[Any] = [None] * self.processes
        dist.gather_object(plan, plans if self._rank == 0 else None, group=self._group, group_dst=0)
        if self._rank:
            for tensor in tensors:
                dist.send(tensor.detach().to(device).contiguous(), group=self._group, group_dst=0)
            return {}
        merged = dict(entries)
        for rank in range(1, self.processes):
            merged |= map_tensors(partial(self._received, rank, device), plans[rank])
        return merged

    def _received(self, rank: int, device: torch.device, like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor.cpu()

    def own_only(self, module: nn.Module) -> AbstractContextManager[set[str]]:
        """Return a context in which only the parameters of this process are shown; it gives the names of the others."""
        return self._stages.own_only(module)


class _Computed(torch.autograd.Function):
    """A loss whose gradients are there: its backward calls a function with the factor of the loss."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, add: Callable[[Tensor], None]) -> Tensor:
        ctx.add = add
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.add(gradients[0])
        return None, None, None


def _kind(part: Any) -> Any:
    """Return what a micro-batch looks like: the shapes and types of its tensors."""
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves(part) if isinstance(leaf, Tensor))


def _detached(output: Any) -> Any:
    # Of split logits, a loss is a DTensor.
    return map_tensors(lambda tensor: whole(tensor.detach()), output)


def _joined_calls(calls: list[tuple[int, LogCall]], sizes: list[int]) -> list[LogCall]:
    """Return (micro-batch, call of ``self.log``) as calls for the whole batch; ``sizes`` are in samples."""
    found: dict[Any, list[tuple[int, LogCall]]] = {}
    counted: dict[Any, int] = {}
    for place, call in calls:
        name = call.arguments["name"]
        key = (place, call.module, name)
        counted[key] = counted.get(key, 0) + 1
        found.setdefault((call.module, name, counted[key]), []).append((place, call))
    joined: list[LogCall] = []
    for (module, _, _), each in found.items():
        last = each[-1][1]
        given, weight = dict(last.arguments), last.weight
        values = [call.arguments["value"] for _, call in each]
        batch_sizes = [call.arguments.get("batch_size") for _, call in each]
        given_sizes = all(size is not None for size in batch_sizes)
        counts = batch_sizes if given_sizes else [sizes[place] for place, _ in each]
        if not isinstance(values[0], nn.Module):
            numbers = torch.stack([torch.as_tensor(value).detach().double().reshape(()) for value in values])
            shares = torch.stack([torch.as_tensor(count).to(numbers) for count in counts])
            if weight is not None:
                each_weight = torch.stack([call.weight for _, call in each if call.weight is not None])
                total, shares = shares.sum(), shares * each_weight.to(numbers)
                weight = shares.sum() / total
            joined_value = _reduced(numbers, shares, given.get("reduce_fx", "mean"))
            kind = torch.as_tensor(values[0]).dtype
            # The mean of whole numbers need not be whole.
            given["value"] = joined_value.to(kind if kind.is_floating_point else torch.get_default_dtype())
        if given_sizes:
            given["batch_size"] = sum(counts)
        joined.append(LogCall(module, given, weight))
    return joined


def _reduced(numbers: Tensor, shares: Tensor, how: str) -> Tensor:
    if how in ("sum", "max", "min"):
        extreme: Tensor = getattr(numbers, how)()
        return extreme
    # Without tokens that count, a mean is not a number.
    return weighed(numbers, shares).sum() / shares.sum()
