"""To how many tokens a batch is padded: a few widths, so that compiled programs and CUDA graphs stay usable."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten._lib import check

# Distinct lengths that the search for the best widths looks at; more are rounded together first.
CANDIDATES = 1024


def check_lengths(owner: str, lengths: Any) -> Tensor:
    """Return the lengths of all samples as an int64 tensor.

    Raises:
        TypeError: they are not whole numbers.
        ValueError: there are none, or one is negative.

    """
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{owner}(lengths): a {type(lengths).__name__} is not a sequence of numbers ({error}). Give the tokens of "
            "every sample: [len(sample) for sample in dataset]."
        ) from error
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        if found.numel():
            raise TypeError(
                f"{owner}(lengths): they are {found.dtype}; use whole numbers, the tokens of every sample."
            )
        found = found.long()
    if found.dim() != 1 or not found.numel():
        raise ValueError(
            f"{owner}(lengths): the shape is {tuple(found.shape)}; give one length for each sample, (samples,), and at "
            "least one sample."
        )
    found = found.detach().to("cpu", torch.int64)
    if int(found.min()) < 0:
        place = int(found.argmin())
        raise ValueError(f"{owner}(lengths): lengths[{place}] is {int(found[place])}; use 0 or more.")
    return found


def check_multiple_of(owner: str, multiple_of: int | Sequence[int] | None) -> None:
    """Check a ``multiple_of``: None, a number, or the widths to choose from.

    Raises:
        TypeError: it is something else.
        ValueError: a number is below 1, or there is none.

    """
    allowed = "a number of tokens such as 8 or 64, widths to choose from such as (64, 128, 256), or None"
    numbers = multiple_of if isinstance(multiple_of, (list, tuple)) else (multiple_of,)
    if not numbers or any(isinstance(number, int) and number < 1 for number in numbers):
        raise check.wrong(owner, "multiple_of", multiple_of, allowed)
    if multiple_of is not None and any(
        isinstance(number, bool) or not isinstance(number, int) for number in numbers
    ):
        raise check.wrong(owner, "multiple_of", multiple_of, allowed, error=TypeError)


def rounded_up(length: int, multiple_of: int | Sequence[int] | None) -> int:
    """Return to how many tokens ``length`` is padded.

    Args:
        length: tokens.
        multiple_of: a number, whose next multiple is taken; or the widths to choose from, of which the next is
            taken and none for what is longer than all; or None for ``length`` itself.

    Example::

        >>> rounded_up(70, 64), rounded_up(70, (50, 100)), rounded_up(120, (50, 100))
        (128, 100, 120)

    """
    if multiple_of is None:
        return length
    if isinstance(multiple_of, int):
        return -(-length // multiple_of) * multiple_of
    widths = sorted(multiple_of)
    place = bisect_left(widths, length)
    return widths[place] if place < len(widths) else length


def all_rounded_up(lengths: Tensor, multiple_of: int | Sequence[int] | None) -> Tensor:
    """Return ``rounded_up`` of each length."""
    if multiple_of is None:
        return lengths
    if isinstance(multiple_of, int):
        return (lengths + multiple_of - 1).div(multiple_of, rounding_mode="floor") * multiple_of
    widths = torch.tensor(sorted(multiple_of))
    places = torch.searchsorted(widths, lengths)
    return torch.where(places < len(widths), widths[places.clamp(max=len(widths) - 1)], lengths)


def widths_for(lengths: Any, count: int = 8, *, multiple_of: int = 8) -> tuple[int, ...]:
    """Return the few widths that leave the least padding when each sample is padded to the next of them.

    Args:
        lengths: tokens of every sample, ``(samples,)``.
        count: how many widths at most.
        multiple_of: each is a multiple of this; the last is the longest length where its multiple would be longer.

    Returns:
        The widths, rising; every length fits in the last.

    Example::

        >>> widths_for([3, 4, 4, 15, 16, 100], 3, multiple_of=4)
        (4, 16, 100)

    """
    found = check_lengths("widths_for", lengths).clamp(min=1)
    longest = int(found.max())
    multiple_of = max(multiple_of, -(-longest // CANDIDATES))
    widths, counts = torch.unique(all_rounded_up(found, multiple_of).clamp(max=longest), return_counts=True)
    if len(widths) <= count:
        return tuple(widths.tolist())
    # best[j]: the tokens after padding of all samples up to candidate j, with j the last width; one more width a round.
    below = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    cost = (widths[:, None] * (below[1:, None] - below[None, :])).double()
    cost = cost.masked_fill(torch.ones_like(cost, dtype=torch.bool).triu(1), torch.inf)
    best, came_from = cost[:, 0], []
    for _ in range(count - 1):
        before = torch.cat([torch.zeros(1, dtype=torch.float64), best])
        best, origin = (cost + before[None, :]).min(1)
        came_from.append(origin)
    chosen, place = [], len(widths)
    for origin in [*reversed(came_from), None]:
        if place == 0:
            break
        chosen.append(int(widths[place - 1]))
        place = 0 if origin is None else int(origin[place - 1])
    return tuple(reversed(chosen))
