"""The largest batch size that fits, found by training with it."""

from __future__ import annotations

from typing import Any

import torch

from hasten._lib.errors import MisconfigurationException
from hasten._lib.memory import give_back_memory, is_out_of_memory
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.tuner import attributes
from hasten.tuner.trial import Trial

MODES = ("power", "binsearch")
_STAGE = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


def check_options(
    mode: str, steps_per_trial: int, init_val: int, max_trials: int, margin: float, max_val: int, owner: str
) -> None:
    """Check the options of a search.

    Raises:
        ValueError: one of them is out of range.

    """
    if mode not in MODES:
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


def search(
    trial: Trial,
    *,
    method: str,
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
        RuntimeError: memory runs out with a single sample.

    """
    stage = _STAGE[method]
    if trial.given(stage) is not None:
        raise MisconfigurationException(
            f"scale_batch_size: the batch size of a loader that is passed in cannot be changed. Define "
            f"{'train' if stage == 'train' else stage.replace('validate', 'val')}_dataloader() in the module or a "
            f"datamodule, with batch_size=self.{name}."
        )
    before = attributes.get(trial.module, trial.datamodule, name)
    try:
        size = _Search(trial, method, steps_per_trial, name, max_val).run(mode, init_val, max_trials, margin)
    except BaseException:
        attributes.put(trial.module, trial.datamodule, name, before)
        raise
    attributes.put(trial.module, trial.datamodule, name, size)
    rank_zero_info(f"scale_batch_size: the batch size is {size}; it was {before}.")
    return size


class _Search:
    def __init__(self, trial: Trial, method: str, steps: int, name: str, max_val: int) -> None:
        self._trial, self._method, self._steps, self._name, self._most = trial, method, steps, name, max_val
        self._left = 0
        self._error: BaseException | None = None

    def run(self, mode: str, first: int, max_trials: int, margin: float) -> int:
        self._left = max_trials
        good, bad = self._double(min(first, self._most))
        if mode == "power":
            return good
        while bad is not None and bad - good > 1 and self._left > 0:
            middle = (good + bad) // 2
            if self._fits(middle):
                good = middle
            else:
                bad = middle
        reduced = max(1, int(good * (1 - margin)))
        # Also the size with the margin is one that was trained.
        while reduced < good and not self._fits(reduced):
            reduced = max(1, reduced // 2)
        return reduced

    def _double(self, size: int) -> tuple[int, int | None]:
        """Return the largest power that fits and the smallest that does not (None: no failure was seen)."""
        good, bad = 0, None
        while self._left > 0:
            if self._fits(size):
                good = size
                if bad is not None or size >= self._most:
                    break
                size = min(2 * size, self._most)
            else:
                bad = size
                if good or size == 1:
                    break
                size //= 2
        if not good:
            raise RuntimeError(
                f"scale_batch_size: no size up to {size} fits into memory, the last one tried is {size}. "
                "Use a smaller model or precision='bf16-mixed', or begin with a smaller init_val."
            ) from self._error
        return good, bad

    def _fits(self, size: int) -> bool:
        self._left -= 1
        trial = self._trial
        attributes.put(trial.module, trial.datamodule, self._name, size)
        self._check_loader(size)
        failed = False
        try:
            trial.try_out(self._method, self._steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = True
            self._error = error.with_traceback(None)
        failed = trial.fails_anywhere(failed)
        give_back_memory()
        rank_zero_info(f"scale_batch_size: {size} {'does not fit' if failed else 'fits'}.")
        return not failed

    def _check_loader(self, size: int) -> None:
        """Lower the largest size to what the data has, and see that the loader follows the attribute."""
        with self._trial.steps(self._method, 1) as run:
            source = {"fit": run.train, "validate": run.validation, "test": run.test, "predict": run.predict}[
                self._method
            ]
            for loader in source.streams():
                used = getattr(loader, "batch_size", None)
                if isinstance(loader, torch.utils.data.DataLoader) and used is not None and used != size:
                    raise MisconfigurationException(
                        f"scale_batch_size: {self._name} is {size}, and the loader's batch_size is {used}. Make the "
                        f"loader with batch_size=self.{self._name}, anew in each call of the hook."
                    )
                samples: Any = getattr(loader, "sampler", None)
                if hasattr(samples, "__len__"):
                    self._most = max(1, min(self._most, len(samples)))
