"""Check loaders: order, sizes, whether workers start, whether samples can be read."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from hasten._lib import torch_private
from hasten._lib.explain import remedy_for
from hasten._lib.tree import leaves
from hasten.data.first_samples import DIVIDE_AMONG_WORKERS, SAME, compare, digest_of, number_to_compare
from hasten.data.loader_parts import is_iterable, length_of, samplers_of, shut_down, with_attributes
from hasten.data.resume.stream import reads_once
from hasten.extend.origin import module_of, package_of
from hasten.logged_value import batch_size_of
from hasten.loops.run_data import HOOK_OF, StageData
from hasten_tools.preflight.report import CheckRow, Rows
from hasten_tools.preflight.said import innermost, row_of_error

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten_tools.preflight.plan import Length
    from hasten_tools.preflight.watch import Observations

# How long the first batch of worker processes is waited for.
WORKER_SECONDS = 60
# Indices of datasets are compared up to this number.
_MOST_COMPARED = 2_000_000
_NAME = {"train": "train data", "validate": "validation data", "test": "test data", "predict": "predict data"}


def check_loaders(run: Run, source: StageData, rows: Rows) -> bool:
    """Check the loaders of a stage, and start their workers; return whether they can be read."""
    readable = True
    loaders = source.streams()
    for index, loader in enumerate(loaders):
        name = _NAME[source.stage] + (f" [{index}]" if len(loaders) > 1 else "")
        if source.all_limits()[index : index + 1] == [0.0]:
            _empty(source, name, loader, rows)
            continue
        if once := one_pass(loader):
            rows.skipped(name, f"{once} can be read once only, and a check would take batches away from the fit")
            readable = False
            continue
        if not isinstance(loader, DataLoader):
            continue
        _check_order(run, source, name, loader, rows)
        if loader.num_workers > 0:
            readable &= _check_workers(name, loader, rows)
    return readable


def _empty(source: StageData, name: str, loader: Any, rows: Rows) -> None:
    if source.is_switched_off:
        return
    dropped = isinstance(loader, DataLoader) and loader.drop_last and not is_iterable(loader)
    count = sample_count(loader)
    if dropped and count:
        what = f"drop_last=True leaves no batch: the dataset has {count} samples, and a batch {loader.batch_size}."
        rows.error(name, what, f"DataLoader(..., batch_size={count}), or drop_last=False")
    else:
        rows.error(name, "The loader has no batches.", f"Look at what {HOOK_OF[source.stage]} returns.")


def sample_count(loader: DataLoader[Any]) -> int:
    """Return the number of samples of a loader's dataset; 0 if it is not known."""
    try:
        dataset: Any = loader.dataset
        return len(dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


def one_pass(loader: Iterable[Any]) -> str:
    """Return what is in a loader that can be read once only, such as a generator; "" if nothing is.

    Example::

        >>> one_pass(x for x in [1, 2]), one_pass([1, 2])
        ('a generator', '')

    """
    if reads_once(loader):
        return f"a {type(loader).__name__}"
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not is_iterable(loader):
        return ""
    for name, value in vars(dataset).items():
        # Other iterators are put back as the objects they are.
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not hasattr(value, "__dict__"):
            return f"{type(dataset).__name__}.{name}, a {type(value).__name__},"
    return ""


def _check_order(run: Run, source: StageData, name: str, loader: DataLoader[Any], rows: Rows) -> None:
    if is_iterable(loader):
        return
    samplers = samplers_of(loader)
    shuffles = any(isinstance(sampler, RandomSampler) for sampler in samplers)
    # A batch sampler of the program may order batches in its own way.
    plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    in_order = plain and any(isinstance(sampler, SequentialSampler) for sampler in samplers)
    overfits = bool(run.arguments.overfit_batches)
    if source.stage == "train" and in_order and not overfits and sample_count(loader) > (loader.batch_size or 1):
        rows.warning(
            name, "The samples come in the same order in each epoch: shuffle=False.", "DataLoader(..., shuffle=True)"
        )
    if source.stage != "train" and shuffles and not overfits:
        rows.warning(name, "An evaluation shuffles its samples: shuffle=True.", "DataLoader(..., shuffle=False)")


def check_overlap(run: Run, rows: Rows) -> None:
    """Warn of training samples that validation reads, too."""
    if run.data.validation.is_off() or run.data.train.is_off() or run.arguments.overfit_batches:
        return
    for one in run.data.validation.streams():
        for other in run.data.train.streams():
            shared, count = _shared(getattr(one, "dataset", None), getattr(other, "dataset", None))
            if shared:
                rows.warning(
                    "validation data",
                    f"{shared} of the {count} validation samples are training samples: their loss says nothing about "
                    "new data.",
                    "torch.utils.data.random_split(dataset, [0.9, 0.1]), with the parts in one loader each",
                )
                return


def _shared(one: object, other: object) -> tuple[int, int]:
    """Return how many samples two datasets share, as far as that can be seen, and how many the first has."""
    whole, indices = _part(one)
    of_other, others = _part(other)
    if whole is None or whole is not of_other or isinstance(whole, IterableDataset):
        return 0, 0
    count = len(whole)
    if count > _MOST_COMPARED:
        return 0, 0
    first = range(count) if indices is None else indices
    second = range(count) if others is None else others
    return len(set(first) & set(second)), len(first)


def _part(dataset: Any) -> tuple[Any, Any]:
    """Return a dataset and the indices of the part of it that is used; None for all."""
    return (dataset.dataset, list(map(int, dataset.indices))) if type(dataset) is Subset else (dataset, None)


def check_last_batch(run: Run, seen: Observations, length: Length, rows: Rows) -> None:
    """Check that batch norm can train on the last batch of an epoch."""
    norms = [
        (name, layer)
        for name, (layer, args, _) in seen.calls.items()
        if isinstance(layer, torch_private.BatchNorm)
        and args
        and _one_value_each(args[0])
        and layer in set(run.module.modules())
    ]
    for loader in run.data.train.streams() if norms else ():
        if not isinstance(loader, DataLoader) or is_iterable(loader) or not loader.batch_size or loader.drop_last:
            continue
        count, batches = sample_count(loader), length_of(loader)
        reads_all = batches is not None and length.batches >= batches and length.processes == 1
        if count % loader.batch_size == 1 and reads_all:
            name, layer = norms[0]
            rows.error(
                _NAME["train"],
                f"The last batch of {count} samples has one sample, and {name} ({type(layer).__name__}) cannot train "
                "on one: Expected more than 1 value per channel.",
                "DataLoader(..., drop_last=True)",
            )


def _one_value_each(inputs: Any) -> bool:
    """Return whether a sample has one value for each channel, as after a linear layer."""
    return isinstance(inputs, Tensor) and inputs.dim() > 1 and inputs.numel() == inputs.shape[0] * inputs.shape[1]


# -- worker processes


def _check_workers(name: str, loader: DataLoader[Any], rows: Rows) -> bool:
    """Start the workers of a loader and read a batch; return whether that works."""
    workers = f"{loader.num_workers} worker{'s' if loader.num_workers > 1 else ''}"
    context: Any = loader.multiprocessing_context or multiprocessing
    starts = context.get_start_method()
    if starts != "fork":
        culprit = unpicklable(loader.dataset, type(loader.dataset).__name__)
        for part in ("collate_fn", "worker_init_fn", *(["batch_sampler"] if is_iterable(loader) else [])):
            # Compared with None: bool() of a sampler asks for its length, and the sampler of a stream has none.
            if culprit is None and (value := getattr(loader, part)) is not None:
                culprit = unpicklable(value, part)
        if culprit is not None:
            rows.error(
                f"{name} workers",
                f"The workers start by {starts!r} and get the dataset pickled, and {culprit} cannot be pickled.",
                "Make it in __getitem__ when it is first needed, or at the top level of a module; "
                'DataLoader(..., multiprocessing_context="fork") does not pickle.',
            )
            return False
    iterator = None
    digests: list[list[str]] = [[] for _ in range(loader.num_workers)]
    try:
        iterator = iter(_short(loader))
        first: list[list[str]] = next(iterator)
        if is_iterable(loader):
            # The workers take turns.
            rounds = -(-number_to_compare(loader.batch_size) // (loader.batch_size or 1))
            batches = itertools.islice(itertools.chain([first], iterator), rounds * loader.num_workers)
            for number, batch in enumerate(batches):
                digests[number % loader.num_workers] += batch
    except StopIteration:
        rows.error(name, "The loader has a length, and its workers give no batch.", "Look at the dataset's __iter__.")
        return False
    except Exception as error:
        rows.take(_worker_error(name, loader, workers, error))
        return False
    finally:
        if iterator is not None:
            shut_down(iterator)
    rows.ok(f"{name} workers", f"{workers} started by {starts!r} and gave a batch")
    if loader.num_workers > 1 and is_iterable(loader) and all(digests) and compare(digests) == SAME:
        rows.warning(
            name,
            f"Each of the {workers} reads all of {type(loader.dataset).__name__}: every sample comes "
            f"{loader.num_workers} times.",
            DIVIDE_AMONG_WORKERS,
        )
    return True


@dataclass
class _Digests:
    """A collate function that joins samples as the user's does, and returns their digests."""

    collate: Callable[[Any], Any]
    joins: bool

    def __call__(self, samples: Any) -> list[str]:
        digests = [digest_of(sample) for sample in samples] if self.joins else [digest_of(samples)]
        self.collate(samples)
        return digests


def _worker_error(name: str, loader: DataLoader[Any], workers: str, error: Exception) -> CheckRow:
    if "timed out" in str(error):
        return CheckRow(
            f"{name} workers",
            "error",
            f"The {workers} gave no batch within {WORKER_SECONDS} seconds.",
            "DataLoader(..., num_workers=0) shows where it waits; a lock or a thread copied by fork often does.",
        )
    failed = failing_sample(loader)
    if failed is not None:
        return sample_row(name, *failed)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    seen = lines[-1] if lines else type(error).__name__
    return CheckRow(
        f"{name} workers",
        "error",
        f"A worker process fails where this process does not: {seen}",
        remedy_for(seen) or "DataLoader(..., num_workers=0) reads in this process.",
    )


def _short(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader that reads the first batch only, with a time limit."""
    changes: dict[str, Any] = {"timeout": WORKER_SECONDS, "persistent_workers": False}
    if is_iterable(loader):
        changes["collate_fn"] = _Digests(loader.collate_fn, loader.batch_size is not None)
    else:
        which = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        first = next(iter(getattr(loader, which)), None)
        changes[which] = [] if first is None else [first]
    return with_attributes(loader, **changes)


def unpicklable(thing: object, path: str, depth: int = 4) -> str | None:
    """Return the part of an object that cannot be pickled, as Python would reach it; None if all can.

    Example::

        >>> class Files:
        ...     def __init__(self):
        ...         self.read = lambda name: name
        >>> unpicklable(Files(), "Files")
        'Files.read (a function defined inside another)'

    """
    problem = _pickling_error(thing)
    if problem is None:
        return None
    if depth and not isinstance(thing, type):
        inside = thing if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})
        for key, value in inside.items():
            step = f"[{key!r}]" if isinstance(thing, Mapping) else f".{key}"
            found = unpicklable(value, path + step, depth - 1)
            if found is not None:
                return found
    if "<locals>" in getattr(thing, "__qualname__", ""):
        return f"{path} (a function defined inside another)"
    kind = type(thing)
    if "<locals>" in kind.__qualname__ or (
        module_of(kind) in ("__main__", "builtins") and "attribute lookup" in problem
    ):
        return f"{path} (a class defined in a function or a prompt)"
    return f"{path} ({kind.__name__}: {problem})"


def _pickling_error(thing: Any) -> str | None:
    try:
        _Light(_Discarding()).dump(thing)
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


class _Discarding(io.RawIOBase):
    """A file that discards everything written to it."""

    def write(self, data: Any) -> int:
        return len(data)


class _Light(pickle.Pickler):
    """Pickles everything but the numbers of arrays and tensors, which can always be sent and may be large."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) or package_of(type(thing)) == "numpy":
            return int, ()
        return NotImplemented


# -- samples


def failing_sample(loader: Iterable[Any]) -> tuple[str, Exception] | None:
    """Return the first sample of the first batch that cannot be read, and its error; None if all can."""
    if not isinstance(loader, DataLoader) or is_iterable(loader):
        return None
    first = next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler), None)
    indices = first if isinstance(first, (list, tuple)) else [first]
    samples, dataset = [], type(loader.dataset).__name__
    for index in indices:
        try:
            samples.append(loader.dataset[index])
        except Exception as error:
            return f"{dataset}[{index!r}]", error
    try:
        loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])
    except Exception as error:
        return "collate_fn", error
    return None


def sample_row(name: str, what: str, error: Exception) -> CheckRow:
    """Return the row of a sample that cannot be read."""
    row = row_of_error(error, name)
    if what == "collate_fn":
        seen = f"The samples of the first batch cannot be joined: {row.seen}"
    else:
        seen = f"{what} raises {row.seen}"
    return CheckRow(name, "error", seen, row.line or "Fix or leave out that sample.", row.place or innermost(error))


def bad_row(batch: object) -> str:
    """Return in which sample of a batch the first number is that is not finite, as a sentence; "" if unknown."""
    size, _ = batch_size_of(batch)
    for leaf in leaves(batch):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.dim() or leaf.shape[0] != size:
            continue
        bad = torch.isfinite(leaf).logical_not().flatten(1).any(1) if leaf.dim() > 1 else ~torch.isfinite(leaf)
        if bool(bad.any()):
            return f" in {int(bad.sum())} of {size} samples, first in sample {int(bad.nonzero()[0])}"
    return ""


# -- labels


def check_labels(run: Run, seen: Observations, rows: Rows) -> None:
    """Compare all labels of the training data, where they are in memory, with the outputs of the last layer."""
    if seen.targets is None or seen.first_batch is None:
        return
    labels, classes, ignored = seen.targets
    for loader in run.data.train.streams():
        values = _all_labels(getattr(loader, "dataset", None), labels, seen.first_batch[0])
        if values is None or not values.numel():
            continue
        wrong = ((values < 0) & (values != ignored)) | ((values >= classes) & (values != ignored))
        if bool(wrong.any()):
            index = int(wrong.flatten().nonzero()[0])
            value = int(values.flatten()[index])
            count = int(wrong.sum())
            rows.error(
                "labels",
                f"Sample {index} has the label {value}{f', and {count - 1} others are wrong' if count > 1 else ''}: "
                f"the last layer has {classes} outputs, so labels have to be 0 to {classes - 1}.",
                f"Give the last layer {int(values.max()) + 1} outputs, or fix the labels."
                if value >= classes
                else "Fix the labels.",
            )
        else:
            rows.ok("labels", f"all {values.numel()} labels are in 0 to {classes - 1}")
        return


def _all_labels(dataset: Any, labels: Tensor, batch: Any) -> Tensor | None:
    if isinstance(dataset, TensorDataset) and isinstance(batch, (list, tuple)) and len(batch) == len(dataset.tensors):
        for part, tensor in zip(batch, dataset.tensors, strict=True):
            if isinstance(part, Tensor) and part.dtype == labels.dtype and torch.equal(part, labels):
                return tensor
        return None
    if type(dataset) is Subset:
        inner = _all_labels(dataset.dataset, labels, batch)
        return None if inner is None else inner[torch.as_tensor(dataset.indices)]
    return _targets(dataset) if labels.dim() == 1 else None


def _targets(dataset: Any) -> Tensor | None:
    """Return the labels that a dataset has as an attribute, as torchvision's datasets do."""
    found = getattr(dataset, "targets", None)
    if isinstance(found, (list, tuple)) and found and type(found[0]) is int:
        found = torch.tensor(found)
    is_labels = isinstance(found, Tensor) and not found.is_floating_point() and found.dim() == 1
    return found if is_labels else None
