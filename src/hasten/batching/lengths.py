"""Batch samplers that put samples of like length together, so that little is padded."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from hasten.batching.pad_widths import all_rounded_up, check_lengths, check_multiple_of, widths_for
from hasten.data.samplers import Alike


class PlannedBatches(Sampler[list[int]]):
    """A batch sampler that lays out a whole epoch at once; the base of those here.

    An epoch's plan depends on the lengths, the random generator and the epoch alone, and has always the same
    number of batches. So every process of a run makes the same plan and takes its own part, and whoever resumes
    in the middle of an epoch finds his place by drawing it again.

    Args:
        owner: the class's name, for messages.
        lengths: tokens of every sample, ``(samples,)``.
        shuffle: another order each epoch.
        seed: of the order, to which the epoch is added; needs ``set_epoch``, which the Trainer calls.
        generator: draws the order instead; by default torch's own does, as for ``RandomSampler``.
        drop_last: leave out the last batch where it is not full.
        num_replicas: the number of processes that share the data, where the sampler shares it itself.
        rank: which of them this is, from 0.
        repeat: give every process the same number of batches, as training needs it.

    """

    num_replicas: int
    rank: int

    def __init__(
        self,
        owner: str,
        lengths: Any,
        *,
        shuffle: bool,
        seed: int | None,
        generator: torch.Generator | None,
        drop_last: bool,
        num_replicas: int | None,
        rank: int | None,
        repeat: bool,
    ) -> None:
        self.lengths = check_lengths(owner, lengths)
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"{owner}(num_replicas={num_replicas!r}, rank={rank!r}): give both or neither.")
        if num_replicas is not None and rank is not None:
            if not 0 <= rank < num_replicas:
                raise ValueError(
                    f"{owner}(rank={rank}): use 0 to {num_replicas - 1} with num_replicas={num_replicas}."
                )
            # Without them the attributes are missing: a loader is shared out by who finds none.
            self.num_replicas, self.rank = num_replicas, rank
        if seed is not None and generator is not None:
            raise ValueError(f"{owner}: seed and generator both say how to shuffle. Give one of them.")
        self.shuffle = shuffle
        self.seed = seed
        self.generator = generator
        self.drop_last = drop_last
        self.repeat = repeat
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order in another epoch, where ``seed`` or several processes make it depend on that."""
        self.epoch = epoch

    def shared(self, num_replicas: int, rank: int, *, seed: int, repeat: bool) -> Self:
        """Return a copy that gives one process's part.

        Args:
            num_replicas: the number of processes.
            rank: which of them this is, from 0.
            seed: the same on every process; the sampler's own goes before.
            repeat: see the class.

        """
        new = copy.copy(self)
        new.num_replicas, new.rank, new.repeat = num_replicas, rank, repeat
        new.seed = seed if self.seed is None and self.generator is None else self.seed
        return new

    def unshuffled(self) -> Self:
        """Return a copy that gives the same batches every epoch."""
        new = copy.copy(self)
        new.shuffle = False
        return new

    def __iter__(self) -> Iterator[list[int]]:
        with self._alike_on_all_processes():
            plan = self._plan(self._drawn_from() if self.shuffle else None)
        for batch in plan:
            yield batch.tolist()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    @abstractmethod
    def _plan(self, generator: torch.Generator | None) -> list[Tensor]:
        """Return this process's batches of an epoch; without a generator, in an order that stays."""

    @property
    def _replicas(self) -> int:
        return getattr(self, "num_replicas", 1)

    @property
    def _rank(self) -> int:
        return getattr(self, "rank", 0)

    def _alike_on_all_processes(self) -> AbstractContextManager[None]:
        several = self._replicas > 1
        return Alike(self._seed() + self.epoch).random_numbers() if several else nullcontext()

    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed

    def _drawn_from(self) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if self.seed is not None or self._replicas > 1:
            return torch.Generator().manual_seed(self._seed() + self.epoch)
        # As RandomSampler does: one draw, then a generator of its own.
        return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))

    def _evened(self, groups: list[Tensor]) -> list[Tensor]:
        """Divide the last two groups anew where the last is too small to give every process a sample."""
        if len(groups) < 2 or not self.repeat or len(groups[-1]) >= self._replicas:
            return groups
        both = torch.cat(groups[-2:])
        return [*groups[:-2], *both.chunk(2)] if len(both) >= 2 * self._replicas else groups

    def _batches(self, groups: list[Tensor], generator: torch.Generator | None) -> list[Tensor]:
        """Return this process's part of each group, the groups in random order; none is empty."""
        if generator is not None:
            groups = [groups[place] for place in torch.randperm(len(groups), generator=generator).tolist()]
        parts = (deal(group, self._replicas, self._rank, repeat=self.repeat) for group in groups)
        return [part for part in parts if len(part)]


def deal(group: Tensor, replicas: int, rank: int, *, repeat: bool) -> Tensor:
    """Return one process's part of what all compute in one step: every ``replicas``-th, so lengths are alike."""
    if repeat and 0 < len(group) < replicas:
        group = group.repeat(-(-replicas // len(group)))[:replicas]
    return group[rank::replicas]


class LengthBatchSampler(PlannedBatches):
    """Batches of samples of like length: shuffled, sorted within windows, and the batches shuffled again.

    Every sample comes exactly once an epoch. Which samples share a batch is random as far as their lengths allow:
    the wider the window, the less is padded and the less is random. On IMDB reviews padded to 512 tokens, half of
    the work is padding, and windows of 50 batches leave 3 % of it.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        batch_size: samples of a batch.
        shuffle: another order each epoch; False keeps to the samples' order, but for the sorting within windows.
        window: batches that are sorted together, for each process.
        multiple_of: to what batches are padded: a number of tokens or the widths to choose from. Samples that are
            padded to the same width are mixed whatever their length; None sorts by the exact length.
        drop_last: leave out the last batch where it is not full; which samples it would have is random.
        seed: of the order, to which the epoch is added (``set_epoch``); by default torch's generator is asked
            once an epoch, as ``RandomSampler`` does.
        generator: draws the order instead.
        sampler: gives the samples' order instead, such as a ``WeightedRandomSampler``; it needs a length.
        num_replicas: the number of processes that share the data. The Trainer and Fabric share by themselves.
        rank: which of them this is, from 0.
        repeat: with several processes, give each the same number of batches, as training needs it: the last batch
            is divided among them, and samples repeat only where there are too few for all. False for
            evaluation: every sample exactly once, and some processes may have a batch less.

    Raises:
        TypeError: the lengths are no whole numbers.
        ValueError: there are none, or an argument is out of range.

    Example::

        >>> import torch
        >>> sampler = LengthBatchSampler([5, 1, 4, 2, 6, 3], batch_size=2, shuffle=False)
        >>> list(sampler)
        [[4, 0], [2, 5], [3, 1]]

    Source: `Khomenko et al., Accelerating recurrent neural network training using sequence bucketing
    <https://arxiv.org/abs/1708.05604>`_.

    """

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        shuffle: bool = True,
        *,
        window: int = 50,
        multiple_of: int | Sequence[int] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        sampler: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        repeat: bool = True,
    ) -> None:
        super().__init__(
            "LengthBatchSampler",
            lengths,
            shuffle=shuffle,
            seed=seed,
            generator=generator,
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
            repeat=repeat,
        )
        self.batch_size = positive("LengthBatchSampler", "batch_size", batch_size, "samples")
        self.window = positive("LengthBatchSampler", "window", window, "batches")
        check_multiple_of("LengthBatchSampler", multiple_of)
        if sampler is not None and not hasattr(sampler, "__len__"):
            raise TypeError(
                f"LengthBatchSampler(sampler={type(sampler).__name__}): it has no length, and an epoch is laid out "
                "as a whole. Give the sampler a __len__."
            )
        self.sampler = sampler
        self._keys = all_rounded_up(self.lengths, multiple_of)

    def set_epoch(self, epoch: int) -> None:
        """Draw another order in another epoch, where ``seed`` or several processes make it depend on that."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def unshuffled(self) -> LengthBatchSampler:
        """Return a copy that gives the same batches every epoch."""
        new = super().unshuffled()
        if isinstance(self.sampler, RandomSampler):
            new.sampler = SequentialSampler(self.sampler.data_source)
        return new

    def __len__(self) -> int:
        samples = len(self.lengths) if self.sampler is None else len(self.sampler)
        full, rest = divmod(samples, self.batch_size * self._replicas)
        more = rest and not self.drop_last and (self.repeat or rest > self._rank)
        return full + bool(more)

    def _plan(self, generator: torch.Generator | None) -> list[Tensor]:
        order = self._order(generator)
        group = self.batch_size * self._replicas
        if self.drop_last:
            # Before the sorting: afterwards the last batch would have the shortest samples.
            order = order[: len(order) // group * group]
        groups: list[Tensor] = []
        for window in order.split(self.window * group):
            groups += window[self._keys[window].argsort(descending=True, stable=True)].split(group)
        return self._batches(self._evened([each for each in groups if len(each)]), generator)

    def _order(self, generator: torch.Generator | None) -> Tensor:
        if self.sampler is not None:
            order = torch.tensor(list(self.sampler), dtype=torch.int64)
            if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(self.lengths):
                raise IndexError(
                    f"LengthBatchSampler: {type(self.sampler).__name__} gives indices from {int(order.min())} to "
                    f"{int(order.max())}, and there are {len(self.lengths)} lengths. Give the length of every sample "
                    "of the dataset."
                )
            return order
        if generator is None:
            return torch.arange(len(self.lengths))
        return torch.randperm(len(self.lengths), generator=generator)


class TokenBatchSampler(PlannedBatches):
    """Batches of at most so many tokens, padding included: many short samples, or few long ones.

    Samples are kept in buckets, one for each of a few widths (those that leave the least padding). A batch has
    samples of one bucket, as many as fit when padded to its width, so the batches of a run have few shapes. What
    is left over in a bucket goes into the next longer one. Every sample comes exactly once an epoch, and every
    epoch has the same number of batches.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        max_tokens: of a batch: samples times the longest. The longest sample must fit.
        shuffle: another order each epoch; False gives the longest batches first and the same every time.
        shapes: widths at most.
        multiple_of: the widths are multiples of it, in tokens.
        max_batch_size: samples of a batch at most; None for what fits.
        drop_last: leave out the last batch where it is not full.
        seed: of the order, to which the epoch is added (``set_epoch``); by default torch's generator is asked
            once an epoch, as ``RandomSampler`` does.
        generator: draws the order instead.
        num_replicas: the number of processes that share the data. The Trainer and Fabric share by themselves.
        rank: which of them this is, from 0.
        repeat: see :class:`LengthBatchSampler`.

    Raises:
        TypeError: the lengths are no whole numbers.
        ValueError: there are none, a sample is longer than ``max_tokens``, or an argument is out of range.

    Example::

        >>> sampler = TokenBatchSampler([5, 1, 4, 2, 6, 3], max_tokens=12, shuffle=False, multiple_of=1)
        >>> [[sampler.lengths[index].item() for index in batch] for batch in sampler]
        [[6], [5, 4], [3, 2, 1]]
        >>> sampler.widths
        (1, 2, 3, 4, 5, 6)

    Source: `Ott et al., fairseq <https://arxiv.org/abs/1904.01038>`_, which batches by a budget of tokens.

    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        shuffle: bool = True,
        *,
        shapes: int = 8,
        multiple_of: int = 8,
        max_batch_size: int | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        repeat: bool = True,
    ) -> None:
        super().__init__(
            "TokenBatchSampler",
            lengths,
            shuffle=shuffle,
            seed=seed,
            generator=generator,
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
            repeat=repeat,
        )
        self.max_tokens = positive("TokenBatchSampler", "max_tokens", max_tokens, "tokens")
        shapes = positive("TokenBatchSampler", "shapes", shapes, "widths")
        multiple_of = positive("TokenBatchSampler", "multiple_of", multiple_of, "tokens")
        if max_batch_size is not None:
            positive("TokenBatchSampler", "max_batch_size", max_batch_size, "samples")
        longest = int(self.lengths.max())
        if longest > max_tokens:
            over = int((self.lengths > max_tokens).sum())
            raise ValueError(
                f"TokenBatchSampler(max_tokens={max_tokens}): {over} of {len(self.lengths)} samples are longer, sample "
                f"{int(self.lengths.argmax())} with {longest} tokens. Use max_tokens={longest} or more, or truncate."
            )
        self.widths = widths_for(self.lengths, shapes, multiple_of=multiple_of)
        most = len(self.lengths) if max_batch_size is None else max_batch_size
        self._sizes = [max(1, min(most, max_tokens // width)) for width in self.widths]
        self._bucket = torch.searchsorted(torch.tensor(self.widths), self.lengths)

    def __len__(self) -> int:
        batches = carried = 0
        for count, size in zip(
            self._bucket.bincount(minlength=len(self.widths)).tolist(), self._sizes, strict=True
        ):
            full, carried = divmod(carried + count, size * self._replicas)
            batches += full
        more = carried and not self.drop_last and (self.repeat or carried > self._rank)
        return batches + bool(more)

    def _plan(self, generator: torch.Generator | None) -> list[Tensor]:
        groups: list[Tensor] = []
        left = torch.empty(0, dtype=torch.int64)
        for bucket, size in enumerate(self._sizes):
            samples = (self._bucket == bucket).nonzero().flatten()
            if generator is not None:
                samples = samples[torch.randperm(len(samples), generator=generator)]
            samples = torch.cat([samples, left])
            full, rest = divmod(len(samples), size * self._replicas)
            # Those of this bucket come first in ``samples``: each batch gets of them, and so has its width.
            left, samples = samples[:rest], samples[rest:]
            groups += [samples[place::full] for place in range(full)]
        if len(left) and not self.drop_last:
            groups.append(left)
        # The longest first: what does not fit in memory shows at once.
        return self._batches(self._evened(groups)[::-1], generator)


def positive(owner: str, name: str, value: Any, unit: str) -> int:
    """Return a number that must be whole and at least 1.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below 1.

    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}({name}={value!r}): use a whole number of {unit}, 1 or more.")
    if value < 1:
        raise ValueError(f"{owner}({name}={value!r}): use 1 or more {unit}.")
    return value
