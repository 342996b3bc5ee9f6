"""Batch samplers that lay out a whole epoch by the samples' lengths, so that little is padded."""

from __future__ import annotations

import copy
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.batching.pad import MOST_TOKENS, all_rounded_up, check_lengths, check_multiple_of, widths_for
from hasten.data.loader_parts import drawn, drawn_generator, drawn_once, order_seed, shared_random_numbers

# Samples of a packed row take one another's place if their lengths, rounded up to this share of the mean, are equal.
GRAIN = 32


class PlannedBatches(Sampler[list[int]]):
    """Base class of batch samplers that lay out a whole epoch at once.

    An epoch's plan depends only on the lengths, the random generator and the epoch, and always has the same number of
    batches. So every process of a run makes the same plan and takes its part, and a run that resumes in the middle of
    an epoch draws the plan again.
    """

    # Missing without ``num_replicas``: then the Trainer or Fabric divides the data.
    num_replicas: int
    rank: int
    # Attributes with the subclass's own arguments that determine the layout of an epoch.
    _arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        shuffle: bool,
        drop_last: bool,
        seed: int | None,
        generator: torch.Generator | None,
        num_replicas: int | None,
        rank: int | None,
        repeat: bool,
    ) -> None:
        owner = type(self).__name__
        self.lengths = check_lengths(owner, lengths)
        check.declared(PlannedBatches.__init__, locals())
        check.whole(owner, "seed", seed, allow_none=True)
        if num_replicas is not None and rank is not None:
            check.whole(owner, "num_replicas", num_replicas, at_least=1, at_most=2**20)
            check.whole(owner, "rank", rank, at_least=0, at_most=num_replicas - 1)
            self.num_replicas, self.rank = num_replicas, rank
        elif (num_replicas is None) != (rank is None):
            what = f"{owner}(num_replicas={check.shown(num_replicas)}, rank={check.shown(rank)}):"
            raise make_error(ValueError, what, fix="give both or neither.", argument="num_replicas")
        if seed is not None and generator is not None:
            raise make_error(
                ValueError, f"{owner}: seed and generator both define how to shuffle.", fix="Give one of them."
            )
        self.shuffle, self.drop_last, self.repeat = shuffle, drop_last, repeat
        self.seed, self.generator = seed, generator
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order in another epoch, if ``seed`` or several processes make it depend on that."""
        self.epoch = epoch

    def shared(self, num_replicas: int, rank: int, *, seed: int, repeat: bool) -> Self:
        """Return a copy that gives one process's part."""
        new = copy.copy(self)
        new.num_replicas, new.rank, new.repeat = num_replicas, rank, repeat
        if self.seed is None and self.generator is None:
            new.seed = seed
        return new

    def unshuffled(self) -> Self:
        """Return a copy that gives the same batches every epoch."""
        new = copy.copy(self)
        new.shuffle = False
        return new

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps():
            if batch := self._part(step, self._rank, repeat=self.repeat):
                yield batch

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    # -- an epoch that continues with another number of processes

    def settings(self) -> dict[str, Any]:
        """Return as plain data what determines the layout of an epoch, besides lengths, epoch and random numbers."""
        names = (*self._arguments, "shuffle", "drop_last", "seed", "repeat")
        return {name: getattr(self, name) for name in names} | {"num_replicas": getattr(self, "num_replicas", None)}

    def with_settings(self, settings: dict[str, Any]) -> Self:
        """Return the sampler with other settings, of the first process."""
        rank = None if settings["num_replicas"] is None else 0
        generator = self.generator if settings["seed"] is None else None
        more = {"sampler": self.sampler} if hasattr(self, "sampler") else {}
        return type(self)(self.lengths, **settings, **more, generator=generator, rank=rank)

    def pieces(self) -> list[list[list[int]]]:
        """Return for each step what other processes may divide: the batches of all, without repeated samples."""
        ranks = range(self._replicas)
        steps = [[self._part(step, rank, repeat=False) for rank in ranks] for step in self._steps()]
        return [[batch for batch in step if batch] for step in steps]

    def divided(self, pieces: list[list[int]]) -> list[list[int]]:
        """Return this process's share of ``pieces``; the last few are halved until each process gets one."""
        replicas = self._replicas
        steps = [pieces[begin : begin + replicas] for begin in range(0, len(pieces), replicas)]
        for last in steps[-1:]:
            while len(last) < replicas:
                most = max(last, key=len)
                if len(most) > 1:
                    last.remove(most)
                    last += [most[::2], most[1::2]]
                else:
                    last.append(most)
        return [step[self._rank] for step in steps]

    # -- internal functions

    @abstractmethod
    def _plan(self, generator: torch.Generator | None) -> list[Any]:
        """Return what all processes compute in each step of an epoch; without a generator, in a fixed order."""

    def _steps(self) -> list[Any]:
        several = self._replicas > 1
        with shared_random_numbers(self._seed() + self.epoch) if several else nullcontext():
            return self._plan(self._generator() if self.shuffle else None)

    def _part(self, step: Any, rank: int, *, repeat: bool) -> list[int]:
        """Return one process's samples of those that all compute in one step.

        Every ``replicas``-th of them has about the same length.
        """
        replicas = self._replicas
        if repeat and len(step) < replicas:
            step = step.repeat(-(-replicas // len(step)))[:replicas]
        part: list[int] = step[rank::replicas].tolist()
        return part

    @property
    def _replicas(self) -> int:
        return getattr(self, "num_replicas", 1)

    @property
    def _rank(self) -> int:
        return getattr(self, "rank", 0)

    def _seed(self) -> int:
        return order_seed(self.seed)

    def _generator(self) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if self.seed is not None or self._replicas > 1:
            return torch.Generator().manual_seed(self._seed() + self.epoch)
        return drawn_generator()

    def _number_of_batches(self, items: int, size: int, full: int = 0) -> int:
        """Return how many batches, of ``size`` for each process, ``items`` make in addition to ``full`` others."""
        more, rest = divmod(items, size * self._replicas)
        last = rest and not self.drop_last and (self.repeat or rest > self._rank)
        return full + more + bool(last)

    def _fits(self, argument: str, most: int) -> None:
        """Check that no sample is longer than the value of an argument."""
        longest = int(self.lengths.max())
        if longest > most:
            what = (
                f"{type(self).__name__}({argument}={most}): {int((self.lengths > most).sum())} of {len(self.lengths)} "
                f"samples are longer, sample {int(self.lengths.argmax())} with {longest} tokens."
            )
            raise make_error(ValueError, what, fix=f"Use {argument}={longest} or more, or truncate.", argument=argument)

    def _evened(self, groups: list[Tensor]) -> list[Tensor]:
        """Divide the last two groups evenly if the last is too small to give every process a sample."""
        if len(groups) < 2 or not self.repeat or len(groups[-1]) >= self._replicas:
            return groups
        both = torch.cat(groups[-2:])
        return [*groups[:-2], *both.chunk(2)] if len(both) >= 2 * self._replicas else groups

    def _in_random_order(self, groups: list[Tensor], generator: torch.Generator | None) -> list[Tensor]:
        """Return the groups that are not empty; a group has the samples of all processes for one step."""
        if generator is not None:
            groups = [groups[place] for place in torch.randperm(len(groups), generator=generator).tolist()]
        return [group for group in groups if len(group)]


class LengthBatchSampler(PlannedBatches):
    """Batches of samples of similar length: shuffled, sorted within windows, and the batches shuffled again.

    Every sample comes exactly once an epoch. Which samples share a batch is random as far as their lengths allow:
    the wider the window, the less is padded and the less is random. On IMDB reviews padded to 512 tokens, half of
    the work is padding, and windows of 50 batches leave 3 % of it.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        batch_size: samples of a batch.
        shuffle: another order each epoch; False keeps the samples' order, but for the sorting within windows.
        window: batches that are sorted together, for each process.
        multiple_of: to what batches are padded: a number of tokens or the widths to choose from. Samples that are
            padded to the same width are mixed whatever their length; None sorts by the exact length.
        drop_last: leave out the last batch if it is not full; which samples it would have is random.
        seed: of the order, to which the epoch is added (``set_epoch``); by default torch's generator is used
            once an epoch, as ``RandomSampler`` does.
        generator: draws the order instead.
        sampler: gives the samples' order instead, such as a ``WeightedRandomSampler``; it needs a length.
        num_replicas: the number of processes that share the data. The Trainer and Fabric set it themselves.
        rank: the index of this process, from 0.
        repeat: with several processes, give each the same number of batches, as training needs it: the last batch
            is divided among them, and samples repeat only if there are too few for all. False for evaluation: every
            sample exactly once, and some processes may have a batch less.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: there are none, or an argument is out of range.

    Example::

        >>> import torch
        >>> sampler = LengthBatchSampler([5, 1, 4, 2, 6, 3], batch_size=2, shuffle=False)
        >>> list(sampler)
        [[4, 0], [2, 5], [3, 1]]

    Source: `Khomenko et al., Accelerating recurrent neural network training using sequence bucketing
    <https://arxiv.org/abs/1708.05604>`_.

    """

    _arguments = ("batch_size", "window", "multiple_of")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int,
        shuffle: bool = True,
        *,
        window: int = 50,
        multiple_of: int | Sequence[int] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        sampler: Iterable[int] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        repeat: bool = True,
    ) -> None:
        super().__init__(lengths, shuffle, drop_last, seed, generator, num_replicas, rank, repeat)
        owner = "LengthBatchSampler"
        self.batch_size = check.whole(owner, "batch_size", batch_size, at_least=1, unit="samples")
        self.window = check.whole(owner, "window", window, at_least=1, unit="batches")
        check_multiple_of(owner, multiple_of)
        check.declared(LengthBatchSampler.__init__, locals())
        if sampler is not None and not hasattr(sampler, "__len__"):
            what = f"{owner}(sampler={type(sampler).__name__}): it has no length, and an epoch is laid out as a whole."
            raise make_error(TypeError, what, fix="Give the sampler a __len__.", argument="sampler")
        self.sampler, self.multiple_of = sampler, multiple_of
        self._keys = all_rounded_up(self.lengths, multiple_of)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self.sampler is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def unshuffled(self) -> LengthBatchSampler:
        new = super().unshuffled()
        new.sampler = None if self.sampler is None else drawn_once(self.sampler, self._seed())
        return new

    def __len__(self) -> int:
        order = cast("Sequence[int] | Tensor", self.lengths if self.sampler is None else self.sampler)
        return self._number_of_batches(len(order), self.batch_size)

    def _plan(self, generator: torch.Generator | None) -> list[Tensor]:
        order = self._order(generator)
        group = self.batch_size * self._replicas
        if self.drop_last:
            # Before the sorting: afterwards the last batch would have the shortest samples.
            order = order[: len(order) // group * group]
        groups: list[Tensor] = []
        for window in order.split(self.window * group):
            groups += window[self._keys[window].argsort(descending=True, stable=True)].split(group)
        return self._in_random_order(self._evened([each for each in groups if len(each)]), generator)

    def pieces(self) -> list[list[list[int]]]:
        return [[[sample] for batch in step for sample in batch] for step in super().pieces()]

    def divided(self, pieces: list[list[int]]) -> list[list[int]]:
        replicas, size = self._replicas, self.batch_size * self._replicas
        samples = torch.tensor(pieces, dtype=torch.int64).flatten()
        groups = [group for group in samples.split(size) if len(group) == size or (len(group) and not self.drop_last)]
        # Neighbors have about the same length, so each process gets neighbors.
        return [
            group.tensor_split(replicas)[self._rank].tolist()
            if len(group) >= replicas
            else self._part(group, self._rank, repeat=True)
            for group in self._evened(groups)
        ]

    def _order(self, generator: torch.Generator | None) -> Tensor:
        if self.sampler is not None:
            order = torch.tensor(drawn(self.sampler), dtype=torch.int64)
            if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(self.lengths):
                raise make_error(
                    IndexError,
                    f"LengthBatchSampler: {type(self.sampler).__name__} gives indices from {int(order.min())} to "
                    f"{int(order.max())}, and there are {len(self.lengths)} lengths.",
                    fix="Give the length of every sample.",
                )
            return order
        if generator is None:
            return torch.arange(len(self.lengths))
        return torch.randperm(len(self.lengths), generator=generator)


class TokenBatchSampler(PlannedBatches):
    """Batches of at most so many tokens, padding included: many short samples, or few long ones.

    Samples are kept in buckets, one for each of a few widths (those that leave the least padding). A batch has
    samples of one bucket, as many as fit when padded to its width, so the batches of a run have few shapes. Samples
    that are left over in a bucket go into the next longer one. Every sample comes exactly once an epoch, and every
    epoch has the same number of batches.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        max_tokens: of a batch: samples times the longest. The longest sample must fit.
        shuffle: another order each epoch; False gives the longest batches first and the same every time.
        shapes: widths at most.
        multiple_of: the widths are multiples of it, in tokens.
        max_batch_size: samples of a batch at most; None for what fits.
        drop_last: leave out the last batch if it is not full. This and all else as in :class:`LengthBatchSampler`.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: there are none, a sample is longer than ``max_tokens``, or an argument is out of range.

    Example::

        >>> sampler = TokenBatchSampler([5, 1, 4, 2, 6, 3], max_tokens=12, shuffle=False, multiple_of=1)
        >>> [[sampler.lengths[index].item() for index in batch] for batch in sampler]
        [[6], [5, 4], [3, 2, 1]]
        >>> sampler.widths
        (1, 2, 3, 4, 5, 6)

    Source: `Ott et al., fairseq <https://arxiv.org/abs/1904.01038>`_, which batches by a budget of tokens.

    """

    _arguments = ("max_tokens", "shapes", "multiple_of", "max_batch_size")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
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
        super().__init__(lengths, shuffle, drop_last, seed, generator, num_replicas, rank, repeat)
        owner = "TokenBatchSampler"
        self.max_tokens = check.whole(owner, "max_tokens", max_tokens, at_least=1, unit="tokens")
        self.shapes = check.whole(owner, "shapes", shapes, at_least=1, unit="widths")
        self.multiple_of = check.whole(
            owner, "multiple_of", multiple_of, at_least=1, at_most=MOST_TOKENS, unit="tokens"
        )
        self.max_batch_size = check.whole(
            owner, "max_batch_size", max_batch_size, at_least=1, unit="samples", allow_none=True
        )
        self._fits("max_tokens", self.max_tokens)
        self.widths = widths_for(self.lengths, self.shapes, multiple_of=self.multiple_of)
        most = len(self.lengths) if self.max_batch_size is None else self.max_batch_size
        self._sizes = [max(1, min(most, self.max_tokens // width)) for width in self.widths]
        self._bucket = torch.searchsorted(torch.tensor(self.widths), self.lengths)

    def __len__(self) -> int:
        full = rest = 0
        counts = self._bucket.bincount(minlength=len(self.widths)).tolist()
        for count, size in zip(counts, self._sizes, strict=True):
            batches, rest = divmod(rest + count, size * self._replicas)
            full += batches
        return self._number_of_batches(rest, self._sizes[-1], full)

    def _plan(self, generator: torch.Generator | None) -> list[Tensor]:
        groups: list[Tensor] = []
        left = torch.empty(0, dtype=torch.int64)
        for bucket, size in enumerate(self._sizes):
            samples = (self._bucket == bucket).nonzero().flatten()
            if generator is not None:
                samples = samples[torch.randperm(len(samples), generator=generator)]
            samples = torch.cat([samples, left])
            full, rest = divmod(len(samples), size * self._replicas)
            # ``samples`` starts with this bucket's, so every batch contains one and is padded to this bucket's width.
            left, samples = samples[:rest], samples[rest:]
            groups += [samples[place::full] for place in range(full)]
        if len(left) and not self.drop_last:
            groups.append(left)
        # The longest first: what does not fit in memory shows at once.
        return self._in_random_order(self._evened(groups)[::-1], generator)


class PackedBatchSampler(PlannedBatches):
    """Batches of samples that fill rows of at most ``max_length`` tokens; for :class:`PackCollator`.

    Lengths decide once which samples share a row (best-fit decreasing over all samples). Each epoch draws which sample
    of like length takes which place, and the order of the rows. So every sample comes exactly once an epoch, rows are
    about as full as they can be, and every epoch has the same number of batches.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        max_length: tokens of a row; no sample is longer.
        rows: rows of a batch.
        shuffle: another order each epoch.
        drop_last: leave out the last batch if it has fewer rows. This and all else as in :class:`LengthBatchSampler`.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: there are none, a sample is longer than a row, or an argument is out of range.

    Example::

        >>> sampler = PackedBatchSampler([5, 3, 6, 2, 2], max_length=9, shuffle=False)
        >>> list(sampler)
        [[2, 1], [0, 3, 4]]

    """

    _arguments = ("max_length", "rows")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_length: int,
        rows: int = 1,
        shuffle: bool = True,
        *,
        drop_last: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        repeat: bool = True,
    ) -> None:
        super().__init__(lengths, shuffle, drop_last, seed, generator, num_replicas, rank, repeat)
        owner = "PackedBatchSampler"
        self.max_length = check.whole(owner, "max_length", max_length, at_least=1, at_most=MOST_TOKENS, unit="tokens")
        self.rows = check.whole(owner, "rows", rows, at_least=1, unit="rows")
        self._fits("max_length", self.max_length)
        grain = max(1, int(self.lengths.double().mean()) // GRAIN)
        self._keys = all_rounded_up(self.lengths, grain).clamp(max=self.max_length)
        self._rows = rows_of(self._keys.tolist(), self.max_length)

    def __len__(self) -> int:
        return self._number_of_batches(len(self._rows), self.rows)

    def _plan(self, generator: torch.Generator | None) -> list[list[list[int]]]:
        rows = self._rows
        if generator is not None:
            takes = self._drawn_places(generator)
            drawn = torch.randperm(len(rows), generator=generator).tolist()
            rows = [[takes[place] for place in rows[number]] for number in drawn]
        group = self.rows * self._replicas
        steps = [rows[begin : begin + group] for begin in range(0, len(rows), group)]
        return [step for step in steps if len(step) == group or not self.drop_last]

    def _drawn_places(self, generator: torch.Generator) -> list[int]:
        """Return for each sample the sample of similar length that takes its place."""
        drawn = torch.randperm(len(self._keys), generator=generator)
        by_key = drawn[self._keys[drawn].argsort(stable=True)]
        takes = torch.empty_like(drawn)
        takes[self._keys.argsort(stable=True)] = by_key
        return takes.tolist()

    def _part(self, step: list[list[int]], rank: int, *, repeat: bool) -> list[int]:
        replicas = self._replicas
        if repeat and len(step) < replicas:
            # Too few rows for all: divide them into documents, and repeat these only if there are still too few.
            step = [[place] for row in step for place in row]
            if len(step) < replicas:
                step = (step * replicas)[:replicas]
        return [place for row in step[rank::replicas] for place in row]


def rows_of(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return which sequences share a row: the longest first, each where it leaves the least room.

    Example::

        >>> rows_of([5, 3, 6, 2, 2], max_length=9)
        [[2, 1], [0, 3, 4]]

    Source: Johnson, `Near-optimal bin packing algorithms <https://dspace.mit.edu/handle/1721.1/57819>`_
    (best-fit decreasing, at most 11/9 of the fewest rows).

    """
    rows: list[list[int]] = []
    # (tokens left, row), rising: the first that is large enough leaves the least.
    room: list[tuple[int, int]] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[place]
        if length > max_length:
            what = f"rows_of(max_length={max_length}): sequence {place} has {length} tokens."
            fix = f"Use max_length={length} or more, or truncate."
            raise make_error(ValueError, what, fix=fix, argument="max_length")
        found = bisect_left(room, (length, -1))
        if found < len(room):
            left, row = room.pop(found)
        else:
            left, row = max_length, len(rows)
            rows.append([])
        rows[row].append(place)
        insort(room, (left - length, row))
    return rows
