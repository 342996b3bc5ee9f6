"""State of a run saved in memory: what a step, or a trial of a few steps, changes and how it is restored in place.

``SavedObjects`` saves objects of the user's, with all inside them. ``StepState`` saves what a training step changes
besides the weights: for a step that is tried again after running out of memory (``micro_batches.py``), one that is
left out because of its loss (``bad_loss.py``), and ``BatchStart``, with which a checkpoint saved inside a batch holds
the state in which the batch began. How one thing is looked at and put back is in ``checkpoint/snapshots.py``.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from hasten._lib import torch_private
from hasten._lib.device import is_out_of_memory
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.tree import is_array, leaves, map_tensors, parameters_of
from hasten.checkpoint.snapshots import (
    FOREIGN,
    SavedBuffers,
    Snapshot,
    attributes,
    own_attributes,
    put_attributes_back,
    showing,
    ways_of,
)
from hasten.extend.origin import ROOTS, comes_from, functions_reached, names_in, package_of
from hasten.logged_value import LoggedValue, is_metric
from hasten.loops.run import Earlier, Run
from hasten.seed import collect_rng_state, is_generator, restore_rng_state

# How many levels of objects and containers inside one another may belong to a step.
_DEPTH = 8
# Containers with more items are not searched: names of files, or what was gathered over many steps.
_MOST_ITEMS = 100_000
_MOST_ITEMS_OF_A_STEP = 1000

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device,
           types.FunctionType, types.MethodType, types.ModuleType)  # fmt: skip
_TRAINING_OBJECTS = (nn.Module, Optimizer, LRScheduler, DataLoader, Dataset, Sampler)
# Packages whose objects are not searched, and those whose subclasses are neither: handles of processes and files.
_FOREIGN_BASES = {*ROOTS, "torch", "enum", "io", "logging", "multiprocessing", "threading"}
_BACK_REFERENCES = ("_trainer", "trainer", "_run_values")


@dataclass(slots=True)
class _SavedTensor:
    """A tensor or a NumPy array, and what it takes to restore it."""

    where: str
    tensor: Any
    version: int | None
    copy: Any = None
    # Another name for the memory of a parameter: a step may give the parameter other memory.
    memory: Tensor | None = None
    required: bool = False
    owns_gradient: bool = False
    gradient: Tensor | None = None

    def was_written(self) -> bool:
        """Return whether the tensor's version shows a write; NumPy and ``.data`` write past it."""
        return self.version is not None and self.tensor._version != self.version

    def restore(self) -> None:
        tensor = self.tensor
        if not isinstance(tensor, Tensor):
            if tensor.flags.writeable:
                tensor[...] = self.copy
            return
        if self.memory is not None:
            tensor.data = self.memory
        if self.copy is not None:
            self._restore_values()
        elif self.was_written():
            raise self._lost("was changed in place by")
        may_have_gradient = tensor.requires_grad or self.required or tensor.grad is not self.gradient
        if self.owns_gradient and tensor.is_leaf and may_have_gradient:
            tensor.grad = self.gradient
            tensor.requires_grad_(self.required)

    def _restore_values(self) -> None:
        tensor, copy = self.tensor, self.copy
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            if tensor.grad_fn is not None and not self.required:
                if torch_private.is_view(tensor):
                    raise self._lost("is a view and became part of the graph in")
                tensor.detach_()
            values = tensor.detach()
            if values.shape == copy.shape and values.dtype == copy.dtype:
                values.copy_(copy)
            else:
                tensor.data = copy.to(values.device, copy=True)
        if self.version is not None:
            self.version = tensor._version

    def _lost(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.where} {what} the attempt that ran out of memory, so the step cannot begin again.\n"
            "Make a new tensor instead (x = x * 2, not x.mul_(2)), or give micro_batch a number that fits."
        )


class SavedObjects:
    """What objects hold, with all inside them, saved to be restored in place.

    Attributes, lists, dicts and sets get their former contents, tensors their former values, generators of random
    numbers their former states. Whoever else holds one of these objects sees it restored.

    Example::

        >>> losses, weights = [1.0], torch.zeros(2)
        >>> saved = SavedObjects()
        >>> saved.save([losses, weights])
        >>> losses.append(2.0)
        >>> _ = weights.add_(1)
        >>> saved.restore()
        >>> losses, weights
        ([1.0], tensor([0., 0.]))

    """

    def __init__(self) -> None:
        self._contents: list[Snapshot] = []
        self._tensors: list[_SavedTensor] = []
        # The objects themselves: an id is theirs only as long as they live.
        self._seen: dict[int, Any] = {}

    def save(self, thing: object, *, values: bool = True) -> None:
        """Save a module, a loader, an optimizer, a container, or any other object, and what it leads to.

        A module must have its parameters, else MisconfigurationException is raised. Without ``values``, those of
        tensors are left out: they are data, which may be large.
        """
        if isinstance(thing, (*_SIMPLE, Tensor, list, dict, set, deque, tuple)):
            self._visit(thing, "", _DEPTH, values)
        elif not self._was_seen(thing):
            if isinstance(thing, nn.Module):
                self._save_training_object(thing, "", _DEPTH, values)
            else:
                self._visit_attributes(thing, "", _DEPTH, values)

    def restore(self) -> None:
        """Restore everything; as often as needed."""
        with torch.inference_mode(False), torch.no_grad():
            for saved in reversed(self._contents):
                saved.restore()
            for tensor in self._tensors:
                tensor.restore()

    def _was_seen(self, thing: Any) -> bool:
        seen = id(thing) in self._seen
        self._seen[id(thing)] = thing
        return seen

    def _note(self, thing: Any, *ways: Callable[..., Any]) -> Any:
        """Save what a thing holds, and return it; ``ways`` are those of ``snapshots.ways_of``."""
        look, put_back = ways or ways_of(thing)
        self._contents.append(Snapshot(thing, look(thing), look, put_back))
        return self._contents[-1].before

    def _visit(self, thing: Any, where: str, depth: int, values: bool) -> None:
        if isinstance(thing, _SIMPLE) or depth < 0 or self._was_seen(thing):
            return
        if isinstance(thing, Tensor):
            self._save_tensor(thing, where, values)
        elif isinstance(thing, (tuple, frozenset)):
            names = getattr(thing, "_fields", None)
            for index, each in enumerate(thing):
                place = f"{where}.{names[index]}" if names else f"{where}[{index}]"
                self._visit(each, place, depth - 1, values)
        elif isinstance(thing, (list, dict, set, deque)):
            self._save_container(thing, where, depth, values)
        elif is_generator(thing):
            self._note(thing)
        elif is_array(thing):
            self._save_array(thing, where, values)
        elif isinstance(thing, _TRAINING_OBJECTS):
            self._save_training_object(thing, where, depth, values)
        elif self._searches(thing):
            self._visit_attributes(thing, where, depth, values)

    def _save_container(self, thing: Any, where: str, depth: int, values: bool) -> None:
        if isinstance(thing, dict):
            items: Iterable[tuple[Any, Any]] = self._note(thing).items()
            if type(thing) is not dict:
                self._visit_attributes(thing, where, depth, values)
        else:
            items = enumerate(self._note(thing))
        if len(thing) <= _MOST_ITEMS:
            for key, each in items:
                self._visit(each, f"{where}[{key!r}]", depth - 1, values)

    def _save_training_object(self, thing: Any, where: str, depth: int, values: bool) -> None:
        if isinstance(thing, nn.Module):
            # A strategy that shards gives parts other classes.
            self._note(thing, lambda part: [type(part)], _put_class_back)
        # The sub-modules of a module are parts of it, however deep they are.
        self._visit_attributes(thing, where, _DEPTH if isinstance(thing, nn.Module) else depth, values)

    def _searches(self, thing: Any) -> bool:
        """Return whether an object is of a class that the user wrote: what it holds may be part of a step."""
        return _is_user_defined(thing)

    def _visit_attributes(self, thing: Any, where: str, depth: int, values: bool) -> None:
        held = self._note(thing, attributes, put_attributes_back)
        # What a dataset holds is data, whoever has it.
        values = values and not isinstance(thing, Dataset)
        for key, each in held.items():
            if key not in _BACK_REFERENCES:
                self._visit(each, f"{where}.{key}", depth - 1, values)

    def _save_tensor(self, tensor: Tensor, where: str, values: bool) -> None:
        if not values:
            return
        if is_lazy(tensor):
            raise MisconfigurationException(
                "The tuner cannot put a lazy layer back to what it was before it had parameters.",
                fix="Run one batch through the module first: model(batch).",
            )
        saved = _SavedTensor(where, tensor, None, required=tensor.requires_grad)
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(tensor, nn.Parameter):
                saved.memory = tensor.detach()
            if not tensor.is_meta and not _is_expanded(tensor):
                # In main memory: the memory of a device is what is being measured.
                saved.copy = tensor.detach().to("cpu", copy=True)
        if tensor.is_leaf:
            saved.owns_gradient, saved.gradient = True, tensor.grad
            if tensor.grad is not None:
                self._visit(tensor.grad, f"{where}.grad", 0, values)
        self._tensors.append(saved)

    def _save_array(self, array: Any, where: str, values: bool) -> None:
        if values:
            self._tensors.append(_SavedTensor(where, array, None, copy=array.copy()))


class SavedBatch(SavedObjects):
    """A batch, whatever classes it is made of, saved before each attempt at a step.

    Tensors are copied until the first step that succeeds has shown which of them it changes, and from then on those
    alone. A write to another tensor shows in its version, and is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        # The places of the tensors that a step changes; None until one has succeeded.
        self._changing: set[str] | None = None

    def save_batch(self, batch: object) -> None:
        """Save a batch in place of the one before."""
        self._contents, self._tensors, self._seen = [], [], {}
        self._visit(batch, "batch", _DEPTH, True)

    def learn(self) -> None:
        """Note which tensors a step that succeeded has changed: the first one any, later ones as the version shows."""
        changed = {saved.where for saved in self._tensors if saved.was_written()}
        if self._changing is None:
            changed |= {
                saved.where
                for saved in self._tensors
                if saved.where not in changed and saved.copy is not None and _differs(saved.tensor, saved.copy)
            }
            self._changing = set()
        self._changing |= changed

    def _save_training_object(self, thing: Any, where: str, depth: int, values: bool) -> None:
        """Leave them alone: modules and loaders are no part of a batch."""

    def _searches(self, thing: Any) -> bool:
        return True

    def _save_tensor(self, tensor: Tensor, where: str, values: bool) -> None:
        if is_lazy(tensor):
            return
        version = None if tensor.is_inference() else tensor._version
        saved = _SavedTensor(where, tensor, version, required=tensor.requires_grad)
        copies = version is None or self._copies(where)
        if copies and not tensor.is_meta and not _is_expanded(tensor):
            saved.copy = _copy_of(tensor)
        if tensor.is_leaf and not isinstance(tensor, nn.Parameter):
            saved.owns_gradient = True
            saved.gradient = tensor.grad if tensor.requires_grad else None
        self._tensors.append(saved)

    def _save_array(self, array: Any, where: str, values: bool) -> None:
        if self._copies(where):
            super()._save_array(array, where, values)

    def _copies(self, where: str) -> bool:
        return self._changing is None or where in self._changing


class StepAttributes:
    """The attributes of a module's parts, restored after an attempt at a step, and what they hold, compared.

    Attributes get their former values, generators of random numbers their former states. What a step changes inside of
    a list, another container or an object, and writes to tensors that are no buffers, is not undone: it is refused, as
    far as it shows. Attributes of torch's own layers are not the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        owner = type(module).__name__
        parts = [(f"{owner}.{name}".rstrip("."), part) for name, part in module.named_modules()]
        self._parts = [(name, part) for name, part in parts if not comes_from(type(part), "torch.nn")]
        self._parameters = [(f"{owner}.{name}", parameter) for name, parameter in module.named_parameters()]
        self._saved: list[Snapshot] = []
        # By place, what is compared and not restored.
        self._held: list[tuple[str, Snapshot]] = []

    def save(self) -> None:
        """Look at the attributes before an attempt."""
        self._saved, self._held = [], []
        for name, part in self._parts:
            attributes = own_attributes(part)
            self._saved.append(Snapshot(part, attributes, own_attributes, put_attributes_back))
            for key, value in attributes.items():
                if key in _BACK_REFERENCES or isinstance(value, _SIMPLE):
                    continue
                if is_generator(value):
                    self._saved.append(Snapshot.of(value))
                elif not is_metric(part):
                    self._compare(f"{name}.{key}", value)
        for name, parameter in self._parameters:
            self._compare(name, parameter)

    def _compare(self, where: str, thing: Any) -> None:
        if (look := _look_into(thing)) is not None:
            self._held.append((where, Snapshot(thing, look(thing), look, put_attributes_back)))

    def restore(self) -> None:
        """Restore the attributes; raise if something that they hold was changed."""
        for where, held in self._held:
            if not held.changed():
                continue
            what, instead = "was changed by", "Change it in on_train_batch_end"
            if isinstance(held.thing, Tensor):
                what = "was changed in place by"
                instead = "Make a new tensor (x = x * 2, not x.mul_(2)), use register_buffer"
            raise RuntimeError(
                f"{where} {what} the attempt that ran out of memory, so the step cannot begin again.\n"
                f"{instead}, or give micro_batch a number that fits."
            )
        for saved in self._saved:
            saved.restore()


def _look_into(thing: Any) -> Callable[[Any], Any] | None:
    """Return what sees changes inside of a thing; None for one that is not looked into."""
    if isinstance(thing, Tensor):
        return None if is_lazy(thing) else _version_of
    if isinstance(thing, (list, dict, set, deque)):
        # Copying one that grows would cost more than the step.
        return len if len(thing) > _MOST_ITEMS_OF_A_STEP else dict if isinstance(thing, dict) else list
    if isinstance(thing, _TRAINING_OBJECTS) or not _is_user_defined(thing):
        return None
    return attributes


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# -- tensors and arrays


def _copy_of(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or tensor.is_cpu:
            raise
    return tensor.detach().to("cpu", copy=True)


def _differs(one: Any, other: Any) -> bool:
    """Return whether two tensors or arrays differ, or might; nan differs from itself."""
    if not isinstance(one, Tensor):
        return bool(one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes())
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    try:
        return not torch.equal(one.detach().to(other.device), other)
    except (RuntimeError, NotImplementedError):
        # A layout without comparison: copying it each time is slower, and right.
        return True


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory: nothing can be written there."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


# -- classes


def _put_class_back(thing: Any, before: list[type]) -> None:
    thing.__class__ = before[0]
    # torch remembers beside the module that it was sharded, and would not shard it again.
    torch_private.forget_that_it_was_sharded(thing)


def _is_user_defined(thing: object) -> bool:
    """Return whether the program, or a library other than torch and NumPy, defines the class of an object."""
    kind: Any = type(thing)
    return _are_users(kind)


@functools.cache
def _are_users(kind: type) -> bool:
    packages = [package_of(base) for base in kind.__mro__]
    return packages[0] not in FOREIGN and _FOREIGN_BASES.isdisjoint(packages)


# -- a step


class StepState:
    """What a training step changes besides the weights, saved between two batches.

    Random generators, buffers, values logged, torchmetrics, the counts of the open accumulation; on request its
    gradients, and with a ``SavedBatch`` the batch and the module's attributes. Kept on the device, without waiting for
    it.
    """

    def __init__(self, run: Run, batch: SavedBatch | None = None) -> None:
        self._run = run
        self._batch = batch
        self._attributes = None if batch is None else StepAttributes(run.module)
        self.buffers = SavedBuffers(run.module)
        self._metrics = [part for part in run.module.modules() if is_metric(part)]
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None

    def save(self, batch: object = None, *, gradients: bool = False) -> None:
        """Save the present state, with that of ``batch`` where batches are saved, and with the gradients if asked."""
        run = self._run
        if self._batch is not None and self._attributes is not None:
            self._batch.save_batch(batch)
            self._attributes.save()
        self._random = collect_rng_state()
        self.buffers.save()
        self._values = {logged: _logged_state(logged) for logged in run.logged.of_stage("train")}
        self._metric_states = [(metric, _metric_state(metric)) for metric in self._metrics]
        self._counts = run.window.weight, run.window.skipped_batches
        self._gradients = None
        if gradients:
            parameters = {id(p): p for p in (*parameters_of(*run.optimizers), *run.module.parameters())}
            self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters.values()]

    def restore(self) -> None:
        """Restore the saved state, as often as needed; raise if a tensor of which there is no copy was changed."""
        run = self._run
        if self._batch is not None and self._attributes is not None:
            self._attributes.restore()
            self._batch.restore()
        restore_rng_state(self._random)
        self.buffers.restore()
        for logged in run.logged.of_stage("train"):
            # A name logged for the first time since then has accumulated nothing.
            for name, value in self._values.get(logged, _NOTHING_LOGGED).items():
                setattr(logged, name, _copied(value) if name in _ADDED_TO else value)
        self._restore_metrics()
        run.window.weight, run.window.skipped_batches = self._counts
        if self._gradients is None:
            # Those of the attempt: the step begins with none.
            for parameter in parameters_of(*run.optimizers) or run.module.parameters():
                parameter.grad = None
        else:
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient.clone()

    def restore_random(self) -> None:
        """Have the random generators draw again what they drew after ``save``."""
        restore_rng_state(self._random)

    def undo_statistics(self) -> None:
        """Undo what the batches since ``save`` added to buffers, metrics and the means over the epoch; nothing else."""
        self.buffers.restore()
        for logged in self._run.logged.of_stage("train"):
            before = self._values.get(logged, _NOTHING_LOGGED)
            logged.total, logged.weight = _copied(before["total"]), before["weight"]
            if logged.metric is not None:
                logged.value = before["value"]
        self._restore_metrics()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the run look as it was saved, and then as it does now; no tensor is written to."""
        run = self._run
        # (attributes, name, value) of all that is shown, but for gradients.
        saved: list[tuple[dict[str, Any], str, Any]] = self.buffers.places()
        for logged in run.logged.of_stage("train"):
            values = self._values.get(logged, _NOTHING_LOGGED)
            saved += [(vars(logged), name, value) for name, value in values.items()]
        weight, skipped = self._counts
        saved += [(vars(run.window), "weight", weight), (vars(run.window), "skipped_batches", skipped)]
        random, gradients = collect_rng_state(), [(p, p.grad) for p, _ in self._gradients or ()]
        restore_rng_state(self._random)
        for parameter, gradient in self._gradients or ():
            parameter.grad = gradient
        try:
            with showing(saved):
                yield
        finally:
            restore_rng_state(random)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def step_succeeded(self) -> None:
        """Note what the step changed of the batch."""
        if self._batch is not None:
            self._batch.learn()

    def _restore_metrics(self) -> None:
        for metric, state in self._metric_states:
            for name, value in state.items():
                setattr(metric, name, _copied(value))


_NOTHING_LOGGED = {"value": None, "total": None, "weight": 0, "metric": None}
# Values are added to these in place.
_ADDED_TO = ("total", "weight")


def _logged_state(logged: LoggedValue) -> dict[str, Any]:
    state = {name: getattr(logged, name) for name in _NOTHING_LOGGED}
    return {**state, **{name: _copied(state[name]) for name in _ADDED_TO}}


def _metric_state(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: _copied(getattr(metric, name)) for name in names}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    # The tensors in a list are never written to, but the list grows.
    return list(value) if isinstance(value, list) else value


# -- a checkpoint saved inside a batch holds the state in which the batch began

# What is called between fetching a batch and moving the counters.
_CALLED_INSIDE = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
)  # fmt: skip


class BatchStart:
    """The state in which the current batch began, for runs whose hooks save checkpoints inside a batch.

    A resumed run computes that batch again from its beginning: the same weights, gradients and random numbers.

    ``saves_inside`` says that hooks save inside of any batch. For an exception alone no copies of the gradients of an
    open accumulation are kept: they may take as much memory as the model.
    """

    def __init__(self, run: Run, *, saves_inside: bool) -> None:
        self._run = run
        self._saves_inside = saves_inside
        self._is_kept = True
        self._state = StepState(run)
        self._earlier = Earlier()
        self._versions: list[int] = []
        # Groups of the optimizers, and what they held besides parameters, such as the learning rate.
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def saved(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, with the state of the run saved before each."""
        run = self._run
        for item in batches:
            # The gradients of a step that is done are cleared before they are needed.
            may_count = run.window.gradients_may_count()
            self._is_kept = self._saves_inside or not may_count
            self._versions = self._weight_versions()
            if not self._is_kept:
                yield item
                continue
            if may_count:
                # What is held back outside of the parameters belongs to them, too.
                run.runtime.engine.sync_gradients(run.module)
            self._state.save(gradients=may_count)
            self._earlier = Earlier(
                metrics=run.metrics.state_dict(copied=True), changes=run.module_changes.state_dict()
            )
            self._options = [
                (group, map_tensors(Tensor.clone, {key: value for key, value in group.items() if key != "params"}))
                for optimizer in run.optimizers
                for group in optimizer.param_groups
            ]
            # A step may change its batch, and the resumed run needs it whole.
            run.data.train.stream.replace_held(self._copied)
            yield item

    def why_lost(self) -> str:
        """Return why the state in which the batch began is not known any more; "" if it is."""
        run = self._run
        if self._versions != self._weight_versions() or run.averages.optimizers:
            return "its weights have changed since the batch began"
        if not self._is_kept:
            return "the gradients with which it began are not kept"
        if run.observers.guard is not None:
            return f"what on_bad_loss={run.arguments.on_bad_loss!r} has found in it so far would count twice"
        return ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the earlier state of the run; tensors are not overwritten, because a backward may still need them."""
        run = self._run
        if why := self.why_lost():
            raise refuse_inside(run, why)
        present = [(group, dict(group)) for group, _ in self._options]
        with self._state.shown():
            run.resume.earlier, run.progress.begun = self._earlier, True
            for group, options in self._options:
                group.update(options)
            try:
                yield
            finally:
                run.resume.earlier, run.progress.begun = Earlier(), False
                for group, options in present:
                    group.update(options)

    def _copied(self, batch: Any) -> Any:
        device = self._run.runtime.device
        # What is moved is copied already, and after an exception nobody asks what a hook did to it before.
        if not self._saves_inside and all(each.device != device for each in leaves(batch) if isinstance(each, Tensor)):
            return batch
        try:
            return deepcopy(batch)
        except Exception:  # A handle cannot be copied, for instance; training goes on without the copy.
            return batch

    def _weight_versions(self) -> list[int]:
        weights = (*parameters_of(*self._run.optimizers), *self._run.module.parameters())
        return [parameter._version for parameter in weights]


def batch_start(run: Run) -> BatchStart | None:
    """Return what keeps the start of each batch, if some hook saves a checkpoint inside one, or after an exception.

    Keeping it takes time in each step, so nobody else pays: the code of the hooks that are called inside a batch, and
    of the methods and functions that they call, is searched for ``save_checkpoint``.
    """
    found = set(map(_saves, run.hooks.owners())) - {""}
    return BatchStart(run, saves_inside="inside" in found) if found else None


def _saves(owner: object) -> Literal["inside", "after", ""]:
    """Return whether a hook saves checkpoints inside a batch, or after an exception in one."""

    def member(name: str) -> Any:
        return vars(owner).get(name, getattr(type(owner), name, None))

    # As ``member`` finds them, without 13 Python calls for each owner in every epoch.
    kind: Any = type(owner)
    own = vars(owner)
    called = [own.get(name, getattr(kind, name, None)) for name in _CALLED_INSIDE]
    if any("save_checkpoint" in names_in(function) for function in functions_reached(called, member)):
        return "inside"
    return "after" if own.get("save_on_exception") or _saves_after_exception(kind) else ""


@functools.cache
def _saves_after_exception(kind: type) -> bool:
    """Return whether a class does, also one of hasten, which is not searched further."""
    hook = getattr(kind, "on_exception", None)
    return hook is not None and "save_checkpoint" in names_in(hook)


def refuse_inside(run: Run, why: str) -> RuntimeError:
    """Return the error of a checkpoint that is saved inside a batch from which no run could continue."""
    return make_error(
        RuntimeError,
        f"Trainer.save_checkpoint() inside a batch (in {run.logged.context.row.name}, batch {run.progress.batch}): a "
        f"resumed run would have to begin the batch again, and {why}.",
        fix="Save in on_train_batch_end, or save the weights alone: save_checkpoint(path, weights_only=True).",
    )
