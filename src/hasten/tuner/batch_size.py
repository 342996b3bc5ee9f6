"""The largest batch size that fits, found by training with it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.out_of_memory import free_cached_memory
from hasten._lib.rank_zero import rank_zero_info
from hasten.loops.run_data import HOOK_OF
from hasten.tuner.probe import ProbeRun

if TYPE_CHECKING:
    from hasten.trainer.limited_runs import Stage


@dataclass(frozen=True)
class BatchSizeOptions:
    """The options of a search.

    Args:
        mode: "power" doubles until memory runs out; "binsearch" then halves the interval.
        steps_per_trial: steps with each size.
        init_val: the first size.
        max_trials: how many sizes are tried at most.
        batch_arg_name: the attribute that holds the size.
        margin: how much smaller than the largest found the size of "binsearch" is, as a share.
        max_val: no larger size is tried.

    """

    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    batch_arg_name: str
    margin: float
    max_val: int

    @classmethod
    def checked(cls, owner: str, mode: str, **options: Any) -> BatchSizeOptions:
        """Return the options of ``owner``.

        Raises:
            ValueError: one of them is out of range.

        """
        error = MisconfigurationException
        mode = check.one_of(owner, "mode", str(mode).lower(), ("power", "binsearch"), error=error)
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            check.whole(owner, name, options[name], at_least=1, error=error)
        check.number(owner, "margin", options["margin"], at_least=0, below=1, error=error)
        return cls(mode, **options)


def search(probe: ProbeRun, *, method: Stage, options: BatchSizeOptions) -> int:
    """Return the largest batch size that trained; it is left set, everything else is restored.

    Raises:
        MisconfigurationException: the size cannot be changed, because loaders were passed or do not use it.
        RuntimeError: none of the sizes tried fits into memory.

    """
    name, source = options.batch_arg_name, probe.run.data_of(method)[0]
    if source.given is not None:
        raise MisconfigurationException(
            "scale_batch_size: the batch size of a loader that is passed in cannot be changed. Define "
            f"{HOOK_OF[source.stage]}() in the module or a datamodule, with batch_size=self.{name}."
        )
    value = probe.value(name)
    before = value.get()
    with value.restored_on_error():
        size = Search(probe, method, options).run()
    value.set(size)
    rank_zero_info(f"scale_batch_size: {name} is {size}; it was {before}.")
    return size


class Search:
    """Tries sizes in a probe run.

    Args:
        probe: the run to try sizes in.
        method: "fit", "validate", "test" or "predict".
        options: of the search.

    """

    # For messages.
    caller = "scale_batch_size"

    def __init__(self, probe: ProbeRun, method: Stage, options: BatchSizeOptions) -> None:
        self._probe, self._method, self._options = probe, method, options
        self._most = options.max_val
        self._trials_left = options.max_trials
        # Whether a loader has a batch size; if not, it can only be read from the batches.
        self._loader_has_size = False
        # Whether a batch of the size that was set has been seen.
        self._batches_have_size = False
        # The number of samples, if known.
        self._samples: int | None = None
        self._before: tuple[int, int] | None = None

    def run(self) -> int:
        """Return the largest size that trained."""
        self._limit_to_the_data()
        good, bad = self._double()
        if self._options.mode == "power":
            return good
        while bad is not None and bad - good > 1 and self._trials_left > 0:
            middle = (good + bad) // 2
            trained = self._trained_with(middle)
            if trained:
                good = trained
            else:
                bad = middle
        return self._with_margin(good)

    def _report(self, text: str) -> None:
        rank_zero_info(text)

    def _set_size(self, size: int) -> None:
        self._probe.value(self._options.batch_arg_name).set(size)

    def _limit_to_the_data(self) -> None:
        self._set_size(self._options.init_val)
        probe = self._probe
        with probe.trainer.limited_run(self._method, 1, batch_size=probe.batch_size) as run:
            self._check(self._options.init_val, run.data_of(self._method)[0].streams())
        if self._samples is not None:
            self._samples = probe.maximum(self._samples)
            self._most = min(self._most, self._samples)

    def _double(self) -> tuple[int, int | None]:
        """Return the largest power that fits and the smallest that does not (None: no failure was seen)."""
        first = self._options.init_val
        first = first if first <= self._most else self._capped()
        size, good, bad = first, 0, None
        while self._trials_left > 0:
            trained = self._trained_with(size)
            if trained:
                good = trained
                if bad is not None or trained >= self._most:
                    break
                size = 2 * size if 2 * size <= self._most else self._capped()
            else:
                bad = size
                if good or size == 1:
                    break
                size //= 2
        if not good:
            smaller = "" if bad == 1 else ", or start with a smaller init_val"
            raise RuntimeError(
                f"{self.caller}: no batch size fits into memory; tried from {first} down to {bad}. Use a smaller model "
                f"or precision='bf16-mixed'{smaller}."
            ) from self._probe.error
        return good, bad

    def _capped(self) -> int:
        why = f"there are {self._samples} samples" if self._most == self._samples else "that is max_val"
        self._report(f"scale_batch_size: no size above {self._most} is tried: {why}.")
        return self._most

    def _with_margin(self, good: int) -> int:
        margin = self._options.margin
        reduced = max(1, int(good * (1 - margin)))
        # The result is a size that was trained, also with the margin.
        while 0 < reduced < good:
            trained = self._trained_with(reduced)
            if trained:
                self._report(
                    f"scale_batch_size: {good} fits; with a margin of {margin:.1%} that is {trained}."
                )
                return trained
            reduced //= 2
        return good

    def _trained_with(self, size: int) -> int:
        """Try a size; return how many samples a batch had, or 0 if memory ran out."""
        self._trials_left -= 1
        self._set_size(size)
        check_loaders = functools.partial(self._check, size)
        largest = self._probe.largest_batch(self._method, self._options.steps_per_trial, check=check_loaders)
        if largest is None or self._probe.run.runtime.device.type != "cpu":
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
                f"scale_batch_size: with {name}={before[0]} and {name}={size} batches have {largest} samples. "
                f"Make the loader with batch_size=self.{name} in each call of the hook."
            )
        return size

    def _check(self, size: int, loaders: list[Any]) -> None:
        """Check that a loader follows the attribute, and count its samples."""
        loaders = [loader for loader in loaders if isinstance(loader, DataLoader)]
        sizes = {size_of(loader) for loader in loaders} - {None}
        self._loader_has_size = bool(sizes)
        if sizes and size not in sizes:
            name = self._options.batch_arg_name
            raise MisconfigurationException(
                f"scale_batch_size: {name} is {size}, and the loader's batch_size is {sizes.pop()}. Make the loader "
                f"with batch_size=self.{name} in each call of the hook."
            )
        counts = [_samples_of(loader) for loader in loaders if not sizes or size_of(loader) == size]
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts):
            self._samples = max(known)


def size_of(loader: DataLoader[Any]) -> int | None:
    """Return the size of a loader's batches; None if its batch sampler has no ``batch_size``."""
    size = loader.batch_size
    return size if size is not None else getattr(loader.batch_sampler, "batch_size", None)


def _samples_of(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
