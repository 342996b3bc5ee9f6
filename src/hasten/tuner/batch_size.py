"""The largest batch size that fits, found by training with it: for the Tuner and for ``Trainer(batch_size="auto")``."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from hasten._lib import check
from hasten._lib.device import free_cached_memory, is_host
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn, warn_once
from hasten.data.loader_parts import length_of, sampler_of
from hasten.data.memory.read import available_bytes
from hasten.elsewhere import conventions
from hasten.loops.micro_batches import check_rebatched
from hasten.loops.resume import resolve_path
from hasten.loops.run_data import HOOK_OF
from hasten.machine.host import process_memory_bytes
from hasten.tuner.probe import ProbeRun
from hasten.tuner.tuned_value import TunedValue

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.trainer.limited_runs import Stage
    from hasten.types import PathLike


@dataclass
class BatchSizeOptions:
    """The options of a search, see ``Tuner.scale_batch_size``; ``owner`` is named in errors.

    Raises:
        ValueError: one of them is out of range.

    """

    owner: str
    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    batch_arg_name: str
    margin: float
    max_val: int

    def __post_init__(self) -> None:
        owner, error = self.owner, MisconfigurationException
        modes = ("power", "binsearch")
        self.mode = check.one_of(owner, "mode", str(self.mode).lower(), modes, error=error)
        for name in ("steps_per_trial", "init_val", "max_val"):
            check.whole(owner, name, getattr(self, name), at_least=1, error=error)
        check.whole(owner, "max_trials", self.max_trials, at_least=0, error=error)
        check.number(owner, "margin", self.margin, at_least=0, below=1, error=error)


def search(run: Run, *, method: Stage, options: BatchSizeOptions) -> int:
    """Return the largest batch size that trained in a run; it is left set, everything else is restored.

    Raises:
        MisconfigurationException: the size cannot be changed, because loaders were passed or do not use it.
        RuntimeError: none of the sizes tried fits into memory.

    """
    name, source, probe = options.batch_arg_name, run.data.of(method)[0], ProbeRun(run)
    if source.given is not None:
        raise MisconfigurationException(
            "scale_batch_size: the batch size of a loader that is passed in cannot be changed.",
            fix=f"Define {HOOK_OF[source.stage]}() in the module or a datamodule, with batch_size=self.{name}.",
        )
    value = probe.value(name)
    before = value.get()
    if run.conventions.warns_of_settings and hasattr(run.module, name) and name in run.module.hparams:
        both = f"Field `model.{name}` and `model.hparams.{name}` are mutually exclusive!"
        rank_zero_warn(f"{both} `model.{name}` is used.", fix="Keep one.")
    with value.restored_on_error():
        size = Search(probe, method, options).run()
    value.set(size)
    rank_zero_info(f"scale_batch_size: {name} is {size}; it was {before}.")
    return size


class Search:
    """Tries sizes in a probe run."""

    caller = "scale_batch_size"
    _report = staticmethod(rank_zero_info)

    def __init__(self, probe: ProbeRun, method: Stage, options: BatchSizeOptions) -> None:
        if probe.run.runtime.several_processes:
            probe.run.runtime.engine.require_alone(self.caller, "Set a batch size.")
        self._probe, self._method, self._options = probe, method, options
        self._most = options.max_val
        self._trials_left = options.max_trials
        # Whether a loader has a batch size; if not, it can only be read from the batches.
        self._loader_has_size = False
        # Whether a batch of the size that was set has been seen.
        self._batches_have_size = False
        # The number of samples, if known.
        self._samples: int | None = None
        # Of the trial before: the size that was set, and the size of its largest batch.
        self._before: tuple[int, int] | None = None

    def run(self) -> int:
        """Return the largest size that trained."""
        self._limit_to_the_data()
        if not self._trials_left:
            return self._capped(self._options.init_val)
        good, bad = self._double()
        if self._options.mode == "power":
            return good
        while bad is not None and bad - good > 1 and self._trials_left > 0:
            middle = (good + bad) // 2
            trained = self._trained_with(middle)
            good, bad = (trained, bad) if trained else (good, middle)
        return self._with_margin(good)

    def _set_size(self, size: int) -> None:
        self._probe.value(self._options.batch_arg_name).set(size)

    def _limit_to_the_data(self) -> None:
        self._set_size(self._options.init_val)
        probe = self._probe
        with probe.trainer.limited_run(self._method, 1, batch_size=probe.batch_size) as run:
            self._check(self._options.init_val, run.data.of(self._method)[0].streams())
        if self._samples is not None:
            self._samples = probe.maximum(self._samples)
            self._most = min(self._most, self._samples)

    def _double(self) -> tuple[int, int | None]:
        """Return the largest power that fits and the smallest that does not (None: no failure was seen)."""
        first = size = self._capped(self._options.init_val)
        good, bad = 0, None
        while self._trials_left > 0:
            trained = self._trained_with(size)
            if trained:
                good = trained
                if bad is not None or trained >= self._most:
                    break
                size = self._capped(2 * size)
            else:
                bad = size
                if good or size == 1:
                    break
                size //= 2
        if not good:
            what = f"{self.caller}: no batch size fits into memory; tried from {first} down to {bad}."
            fix = "Use a smaller model or init_val, or precision='bf16-mixed'."
            raise make_error(RuntimeError, what, fix=fix) from self._probe.error
        return good, bad

    def _capped(self, size: int) -> int:
        if size <= self._most:
            return size
        self._report(f"scale_batch_size: no size above {self._most} is tried: that is max_val, or all of the data.")
        return self._most

    def _with_margin(self, good: int) -> int:
        margin = self._options.margin
        reduced = max(1, int(good * (1 - margin)))
        # The result is a size that was trained, also with the margin.
        while 0 < reduced < good:
            trained = self._trained_with(reduced)
            if trained:
                self._report(f"scale_batch_size: {good} fits; with a margin of {margin:.1%} that is {trained}.")
                return trained
            reduced //= 2
        return good

    def _trained_with(self, size: int) -> int:
        """Try a size; return how many samples a batch had, or 0 if memory ran out."""
        self._trials_left -= 1
        self._set_size(size)
        check_loaders = functools.partial(self._check, size)
        largest = self._probe.largest_batch(self._method, self._options.steps_per_trial, check=check_loaders)
        if largest is None or not is_host(self._probe.run.runtime.device):
            # Garbage of this trial would count for the next one.
            free_cached_memory()
        self._report(f"scale_batch_size: {size} {'does not fit' if largest is None else 'fits'}.")
        return 0 if largest is None else self._size_of_batches(size, largest)

    def _size_of_batches(self, size: int, largest: int) -> int:
        before, self._before = self._before, (size, largest)
        if self._samples is not None and self._loader_has_size:
            return size
        if largest == size:
            self._batches_have_size = True
        elif self._batches_have_size and self._samples is None and largest < size:
            # There are no more samples than that.
            self._most = self._samples = largest
            return largest
        elif self._loader_has_size or not largest or before is None or before == (size, largest):
            return size
        elif before[1] == largest:
            name = self._options.batch_arg_name
            raise MisconfigurationException(
                f"scale_batch_size: with {name}={before[0]} and {name}={size} batches have {largest} samples.",
                fix=f"Make the loader with batch_size=self.{name} in each call of the hook.",
            )
        return size

    def _check(self, size: int, loaders: list[Any]) -> None:
        """Check that a loader follows the attribute, and count its samples."""
        loaders = [loader for loader in loaders if isinstance(loader, DataLoader)]
        sizes = {_size_of(loader) for loader in loaders} - {None}
        self._loader_has_size = bool(sizes)
        follows = not sizes or size in sizes
        if not follows:
            name = self._options.batch_arg_name
            what = f"scale_batch_size: {name} is {size}, and the loader's batch_size is {sizes.pop()}."
            fix = f"Make the loader with batch_size=self.{name} in each call of the hook."
            if not conventions.current().mistakes_are_warnings:
                raise MisconfigurationException(what, fix=fix)
            warn_once("a loader without the batch size", what, fix=fix)
        chosen = [loader for loader in loaders if not sizes or not follows or _size_of(loader) == size]
        counts = [length_of(sampler_of(loader)) for loader in chosen]
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts):
            self._samples = max(known)


def _size_of(loader: DataLoader[Any]) -> int | None:
    """Return the size of a loader's batches; None if its batch sampler has no ``batch_size``."""
    size = loader.batch_size
    return size if size is not None else getattr(loader.batch_sampler, "batch_size", None)


# -- Trainer(batch_size="auto")

_MOST_TRIALS = 40
# Memory of a device varies from batch to batch, and from one epoch to the next.
_MARGIN = 0.05
_MOST = 65_536
# On the CPU, where memory hardly runs out, larger batches only make fewer steps of an epoch.
_MOST_ON_CPU = 1024
# Of the memory available on the host: a process that takes more than there is gets killed, without an error.
_SHARE_OF_HOST = 0.5


def find_batch_size(
    trainer: Trainer,
    module: LightningModule,
    given: dict[str, Any],
    datamodule: LightningDataModule | None,
    ckpt_path: PathLike | None,
) -> int | None:
    """Return the largest batch size, and set it where module or datamodule have a ``batch_size``.

    Weights, optimizers, random numbers, loaders and counters are restored, and no file is written. All processes find
    the same size: one that fits on each of them.

    Returns: The size; None to keep the size of the loader (``fast_dev_run``), or of the checkpoint of a resumed run.

    Raises:
        ValueError: something else than a loader decides how large its batches are.
        RuntimeError: not even one sample fits.

    """
    if trainer.fast_dev_run:
        rank_zero_info("Trainer(batch_size='auto', fast_dev_run=...): the batch size stays that of the loader.")
        return None
    if resolve_path(trainer, ckpt_path) is not None:
        return None
    size: int = trainer.prepared_run("fit", module, given, datamodule, _search_automatically)
    TunedValue(module, datamodule or trainer.datamodule, "batch_size").set(size)
    return size


def _search_automatically(run: Run) -> int:
    probe = ProbeRun(run)
    loaders = run.data.train.streams()
    for loader in loaders:
        check_rebatched(loader, "auto", name="the train dataloader")
    sizes = [_size_of(loader) or 1 for loader in loaders if isinstance(loader, DataLoader)]
    loader_size = probe.maximum(max(sizes))
    on_cpu = is_host(run.runtime.device)
    most, margin = (_MOST_ON_CPU, 0.0) if on_cpu else (_MOST, _MARGIN)
    first = min(loader_size, most)
    owner, name = _AutomaticSearch.caller, "batch_size"
    options = BatchSizeOptions(owner, "binsearch", 3, first, _MOST_TRIALS, name, margin, most)
    search = _AutomaticSearch(probe, options, on_cpu=on_cpu)
    size = search.run()
    rank_zero_info(
        f"Trainer(batch_size='auto'): {size} samples a batch of each process; the loader has {loader_size}. "
        f"{search.why_not_larger(size)}"
    )
    return size


class _AutomaticSearch(Search):
    """A search that changes the batch size of the loaders, also of those passed to the call."""

    caller = "Trainer(batch_size='auto')"
    _report = staticmethod(rank_zero_debug)

    def __init__(self, probe: ProbeRun, options: BatchSizeOptions, *, on_cpu: bool) -> None:
        super().__init__(probe, "fit", options)
        self._on_cpu = on_cpu
        # The smallest size that did not fit, and the one at which the host's memory was nearly used up.
        self._too_large: int | None = None
        self._at_limit: int | None = None

    def why_not_larger(self, size: int) -> str:
        """Return why a size that was found is not larger."""
        if self._too_large is not None:
            margin = f", and {self._options.margin:.0%} are kept free" if self._options.margin else ""
            return f"{self._too_large} do not fit into memory{margin}."
        if self._at_limit is not None:
            return f"A step with {self._at_limit} takes half of the memory that is available on this machine."
        if self._samples is not None and size >= self._samples:
            return "That is all of the training data."
        if size >= self._options.max_val:
            on_cpu = " on a CPU, where larger ones only make fewer steps of an epoch" if self._on_cpu else ""
            return f"No more than {self._options.max_val} are tried{on_cpu}."
        return f"No larger size was tried, after {self._options.max_trials} attempts."

    def _set_size(self, size: int) -> None:
        self._probe.batch_size = size
        super()._set_size(size)

    def _trained_with(self, size: int) -> int:
        if not self._on_cpu:
            return self._noted(size, super()._trained_with(size))
        # "5" resets the peak to the present size.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = process_memory_bytes() or 0
        trained = self._noted(size, super()._trained_with(size))
        growth = (process_memory_bytes(peak=True) or 0) - before
        if trained and self._probe.maximum(int(2 * growth > _SHARE_OF_HOST * available_bytes())):
            self._most = self._at_limit = trained
        return trained

    def _noted(self, size: int, trained: int) -> int:
        if not trained:
            self._too_large = min(size, self._too_large or size)
        return trained
