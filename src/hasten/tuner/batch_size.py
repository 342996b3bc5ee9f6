"""The largest batch size that fits, found by training with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.out_of_memory import free_cached_memory
from hasten._lib.rank_zero import rank_zero_info
from hasten.loops.run_data import HOOK_OF
from hasten.tuner import attributes
from hasten.tuner.trial import STAGE_OF, Stage, Trial

MODES = ("power", "binsearch")


def check_options(
    mode: str, steps_per_trial: int, init_val: int, max_trials: int, margin: float, max_val: int, owner: str
) -> str:
    """Check the options of a search; return the mode as it is called here.

    Raises:
        ValueError: one of them is out of range.

    """
    if str(mode).lower() not in MODES:
        raise MisconfigurationException(
            f"{owner}(mode={mode!r}): `mode` should be one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}"
        )
    for name, value in (
        ("steps_per_trial", steps_per_trial),
        ("init_val", init_val),
        ("max_trials", max_trials),
        ("max_val", max_val),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MisconfigurationException(f"{owner}({name}={value!r}): use a whole number of at least 1.")
    if not 0.0 <= margin < 1.0:
        raise MisconfigurationException(f"{owner}(margin={margin!r}): `margin` should be between 0 and 1.")
    return mode.lower()


def search(
    trial: Trial,
    *,
    method: Stage,
    mode: str,
    steps_per_trial: int,
    init_val: int,
    max_trials: int,
    name: str,
    margin: float,
    max_val: int,
) -> int:
    """Return the largest batch size that trained; it is left set, everything else is as before.

    Args:
        trial: the run to try sizes in.
        method: "fit", "validate", "test" or "predict".
        mode: "power" doubles until memory runs out; "binsearch" then halves the interval.
        steps_per_trial: steps with each size.
        init_val: the first size.
        max_trials: how many sizes are tried at most.
        name: the attribute that holds the size.
        margin: how much smaller than the largest found the size of "binsearch" is, as a share.
        max_val: no larger size is tried.

    Raises:
        MisconfigurationException: the size cannot be changed, because loaders were passed or do not use it.
        RuntimeError: none of the sizes tried fits into memory.

    """
    stage = STAGE_OF[method]
    if trial.given(stage) is not None:
        raise MisconfigurationException(
            "scale_batch_size: the batch size of a loader that is passed in cannot be changed. Define "
            f"{HOOK_OF[stage]}() in the module or a datamodule, with batch_size=self.{name}."
        )
    before = attributes.get(trial.module, trial.datamodule, name)
    undo = attributes.remember(trial.module, trial.datamodule, name)
    try:
        size = Search(trial, method, steps_per_trial, name, max_val).run(mode, init_val, max_trials, margin)
    except BaseException:
        undo()
        raise
    attributes.put(trial.module, trial.datamodule, name, size)
    rank_zero_info(f"scale_batch_size: {name} is {size}; it was {before}.")
    return size


class Search:
    """Tries sizes in a trial.

    Args:
        trial: the run to try sizes in.
        method: "fit", "validate", "test" or "predict".
        steps: steps with each size.
        name: the attribute that holds the size.
        max_val: no larger size is tried.
        say: what each size tried is said with.
        put: sets a size; by default the attribute.

    """

    # How it was asked for, for messages.
    asked = "scale_batch_size"

    def __init__(
        self,
        trial: Trial,
        method: Stage,
        steps: int,
        name: str,
        max_val: int,
        *,
        say: Callable[[str], None] = rank_zero_info,
        put: Callable[[int], None] | None = None,
    ) -> None:
        self._trial, self._method, self._steps, self._name, self._most = trial, method, steps, name, max_val
        self._say = say
        self._put = self._put_attribute if put is None else put
        self._left = 0
        # Whether a loader says which size it has; if not, only the batches tell.
        self._is_said = False
        # The samples there are; None where nobody knows.
        self._samples: int | None = None
        # Whether a batch is known to tell its size.
        self._tells = False
        self._before: tuple[int, int] | None = None

    def run(self, mode: str, first: int, max_trials: int, margin: float) -> int:
        """Return the largest size that trained."""
        self._left = max_trials
        self._limit_to_the_data(first)
        good, bad = self._double(first if first <= self._most else self._capped())
        if mode == "power":
            return good
        while bad is not None and bad - good > 1 and self._left > 0:
            middle = (good + bad) // 2
            trained = self._trained_with(middle)
            if trained:
                good = trained
            else:
                bad = middle
        return self._with_margin(good, margin)

    def _limit_to_the_data(self, size: int) -> None:
        self._put(size)
        trial = self._trial
        with trial.trainer.limited_run(self._method, 1, batch_size=trial.batch_size) as run:
            self._check(size, run.sources_of(self._method)[0].streams())
        if self._samples is not None:
            self._samples = trial.largest(self._samples)
            self._most = min(self._most, self._samples)

    def _double(self, first: int) -> tuple[int, int | None]:
        """Return the largest power that fits and the smallest that does not (None: no failure was seen)."""
        size, good, bad = first, 0, None
        while self._left > 0:
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
            lower = "" if bad == 1 else ", or begin with a smaller init_val"
            raise RuntimeError(
                f"{self.asked}: no batch size fits into memory; tried from {first} down to {bad}. Use a smaller model "
                f"or precision='bf16-mixed'{lower}."
            ) from self._trial.error
        return good, bad

    def _capped(self) -> int:
        why = f"there are {self._samples} samples" if self._most == self._samples else "that is max_val"
        self._say(f"scale_batch_size: no size above {self._most} is tried: {why}.")
        return self._most

    def _with_margin(self, good: int, margin: float) -> int:
        reduced = max(1, int(good * (1 - margin)))
        # What is returned is a size that was trained, also with the margin.
        while 0 < reduced < good:
            trained = self._trained_with(reduced)
            if trained:
                self._say(f"scale_batch_size: {good} fits; with a margin of {margin:.1%} that is {trained}.")
                return trained
            reduced //= 2
        return good

    def _trained_with(self, size: int) -> int:
        """Try a size; return how many samples a batch had, or 0 where memory ran out."""
        self._left -= 1
        self._put(size)
        largest = self._trial.try_out(self._method, self._steps, check=functools.partial(self._check, size))
        if largest is None or self._trial.run.runtime.device.type != "cpu":
            # What a trial left for the garbage collector would count for the next one.
            free_cached_memory()
        self._say(f"scale_batch_size: {size} {'does not fit' if largest is None else 'fits'}.")
        return 0 if largest is None else self._size_of_batches(size, largest)

    def _size_of_batches(self, size: int, largest: int) -> int:
        before, self._before = self._before, (size, largest)
        if self._samples is not None and self._is_said:
            return size
        if largest == size:
            self._tells = True
        elif self._tells and self._samples is None and largest < size:
            # There are no more samples than that.
            self._most = self._samples = largest
            return largest
        elif (
            not self._is_said
            and largest
            and before is not None
            and before[0] != size
            and before[1] == largest
        ):
            raise MisconfigurationException(
                f"scale_batch_size: with {self._name}={before[0]} and {self._name}={size} batches have {largest} "
                f"samples. Make the data with batch_size=self.{self._name}, anew in each call of the hook."
            )
        return size

    def _put_attribute(self, size: int) -> None:
        attributes.put(self._trial.module, self._trial.datamodule, self._name, size)

    def _check(self, size: int, loaders: list[Any]) -> None:
        """See that a loader follows the attribute, and how many samples there are."""
        loaders = [loader for loader in loaders if isinstance(loader, DataLoader)]
        said = {size_of(loader) for loader in loaders} - {None}
        self._is_said = bool(said)
        if said and size not in said:
            raise MisconfigurationException(
                f"scale_batch_size: {self._name} is {size}, and the loader's batch_size is {said.pop()}. Make the "
                f"loader with batch_size=self.{self._name}, anew in each call of the hook."
            )
        numbers = [_samples_of(loader) for loader in loaders if not said or size_of(loader) == size]
        known = [number for number in numbers if number is not None]
        if known and len(known) == len(numbers):
            self._samples = max(known)


def size_of(loader: DataLoader[Any]) -> int | None:
    """Return the size of a loader's batches; None where its batch sampler does not say."""
    size = loader.batch_size
    return size if size is not None else getattr(loader.batch_sampler, "batch_size", None)


def _samples_of(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
