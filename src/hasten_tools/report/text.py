"""Large text files: their lines in blocks, and the numbers in them as arrays, equal to those of ``float()``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Arrays of a block's numbers stay in the caches of a core.
BLOCK_BYTES = 2 << 20
# Before and after the text of a block: what is read around its first and last characters.
_PAD = 64
_NEWLINE, _COMMA, _MINUS, _POINT, _E, _ZERO = b"\n,-.e0"

# A number has up to this many characters: three words of 8.
_LONGEST = 24
_MOST_PLACES = 44
_SPLIT = 2.0**27 + 1
_UNSURE = 2.0**-40


class Block:
    """Whole lines of a file, which are there until the next block is read.

    Args:
        buffer: the text, with space around it.
        end: where the text ends, after a newline.
        number: how many lines of the file come before.
        unfinished: whether the file does not have the last newline.

    """

    def __init__(self, buffer: bytearray, end: int, number: int, *, unfinished: bool) -> None:
        self._buffer, self._end, self.number, self._unfinished = buffer, end, number, unfinished
        self.text = np.frombuffer(buffer, np.uint8)
        # The 8 characters from each place on.
        self.words = np.ndarray((len(buffer) - 7,), "<u8", buffer, strides=(1,))
        self.ends = self._places(_NEWLINE)
        self.begins = np.concatenate([[_PAD], self.ends[:-1] + 1])
        self.commas = self._places(_COMMA)
        # For each line: the number of its first comma in the block, and how many it has.
        self.first_comma = np.searchsorted(self.commas, self.begins)
        self.comma_counts = np.diff(self.first_comma, append=len(self.commas))

    def __len__(self) -> int:
        return len(self.ends)

    def _places(self, character: int) -> Ints:
        return np.flatnonzero(self.text[_PAD : self._end] == character) + _PAD

    def contains(self, characters: bytes) -> bool:
        """Return whether characters are in the text."""
        return self._buffer.find(characters, _PAD, self._end) >= 0

    def lines(self) -> Iterator[str]:
        """Yield the lines with their newlines."""
        return map(self.line, range(len(self)))

    def line(self, place: int) -> str:
        """Return a line with its newline, if the file has it."""
        text = self._buffer[self.begins[place] : self.ends[place] + 1].decode("utf-8", errors="replace")
        return text[:-1] if self._unfinished and place == len(self) - 1 else text

    def has(self, text: Text, at: Ints) -> Flags:
        """Return for each place whether ``text`` ends there."""
        found = np.ones(len(at), np.bool_)
        at = np.minimum(at, self.ends[-1] + 1)
        for back, mask, word in text.words:
            found &= self.words[at - back] & mask == word
        return found


class Text:
    """Characters that are looked for, in words of 8.

    Args:
        characters: not empty.

    """

    def __init__(self, characters: bytes) -> None:
        self.length, self.commas = len(characters), characters.count(b",")
        self.words: list[tuple[int, np.uint64, np.uint64]] = []
        for end in range(len(characters), 0, -8):
            part = characters[max(0, end - 8) : end]
            mask, word = (bytes(8 - len(part)) + some for some in (b"\xff" * len(part), part))
            known = [np.uint64(int.from_bytes(some, "little")) for some in (mask, word)]
            self.words.append((len(characters) - end + 8, known[0], known[1]))


def read_blocks(path: Path) -> Iterator[Block]:
    """Yield the lines of a file, also one that does not end with a newline."""
    buffer = bytearray(_PAD + BLOCK_BYTES + _PAD)
    used, number = _PAD, 0
    with path.open("rb", buffering=0) as file:
        while True:
            if used == len(buffer) - _PAD:
                # A line is longer than the block.
                buffer = buffer.ljust(2 * len(buffer), b"\0")
            count = file.readinto(memoryview(buffer)[used : len(buffer) - _PAD])
            if not count and used == _PAD:
                return
            if not count:
                buffer[used] = _NEWLINE
                used += 1
            used += count
            end = buffer.rfind(b"\n", _PAD, used) + 1
            if end:
                block = Block(buffer, end, number, unfinished=not count)
                number += len(block)
                yield block
                del block
                rest = buffer[end:used]
                used = _PAD + len(rest)
                buffer[_PAD:used] = rest


def read_numbers(block: Block, starts: Ints, ends: Ints) -> tuple[Floats, Flags]:
    """Return the numbers that stand between places of a block, and whether each is a number.

    Words such as ``nan``, also in quotation marks, are numbers, as they are for ``float``.
    """
    values, is_number = _decimals(block, starts, ends)
    for place in np.flatnonzero(~is_number):
        try:
            values[place] = float(block.text[starts[place] : ends[place]].tobytes().strip(b'"'))
        except ValueError:
            continue
        is_number[place] = True
    return values, is_number


def _decimals(block: Block, starts: Ints, ends: Ints) -> tuple[Floats, Flags]:
    """Return the numbers written with digits, and which these are; the few that are hard to round are not."""
    text, words = block.text, block.words
    is_negative = text[starts] == _MINUS
    starts = starts + is_negative
    exponents = np.zeros(len(starts), np.int64)
    # 5.5e-05
    if (is_small := (text[ends - 4] == _E) & (text[ends - 3] == _MINUS)).any():
        tens, ones = (np.where(is_small, text[ends - back] - _ZERO, 0) for back in (2, 1))
        is_small &= (tens < 10) & (ones < 10)
        exponents = np.where(is_small, 10 * tens.astype(np.int64) + ones, 0)
        ends = ends - 4 * is_small
    points = starts + 1
    searched = np.flatnonzero(text[points] != _POINT)
    while len(searched):
        searched = searched[points[searched] < ends[searched]]
        points[searched] += 1
        searched = searched[text[points[searched]] != _POINT]
    lengths = ends - starts
    # The place of the point, counted from behind and from 1; 0 for none.
    behind = np.maximum(ends - points, 0)
    powers = np.maximum(behind - 1, 0) + exponents
    is_known = (lengths > (behind > 0)) & (lengths <= _LONGEST) & (powers <= _MOST_PLACES)
    kinds = np.where(is_known, lengths * (_LONGEST + 2) + behind, 0)

    digits = np.zeros(len(starts), np.uint64)
    others = np.zeros(len(starts), np.uint64)
    for part in (2, 1, 0):
        word = (words[ends - 8 * (part + 1)] ^ _ZEROS) & _MASKS[part].take(kinds)
        others |= word | (word + _ABOVE_NINE)
        # Pairs of digits, then fours, then all eight.
        word = (word * _u64(2561)) >> _u64(8)
        word = ((word & _u64(0x00FF00FF00FF00FF)) * _u64(6553601)) >> _u64(16)
        word = ((word & _u64(0x0000FFFF0000FFFF)) * _u64(42949672960001)) >> _u64(32)
        if part == 2:
            # Fewer than 20 digits together.
            is_known &= word < _u64(1000)
        digits *= _u64(10**8)
        digits += word
    is_known &= others & _HIGH_BITS == 0
    digits *= is_known
    # The point was read as a zero.
    behind = np.where(is_known, behind, 0)
    digits -= digits // _WHOLE.take(behind) * _GAPS.take(behind)
    values, is_sure = _divided(digits, np.where(is_known, powers, 0))
    return np.where(is_negative, -values, values), is_known & is_sure


def _divided(digits: NDArray[np.uint64], powers: Ints) -> tuple[Floats, Flags]:
    """Return ``digits / 10**powers``, rounded once, and whether it is sure to which side."""
    near = digits.astype(np.float64)
    missing = (digits - near.astype(np.uint64)).view(np.int64)
    power, upper_power, lower_power, beyond = (_POWERS[row].take(powers) for row in range(4))
    values: Floats = near / power
    # What the division left, exact: products of halves of doubles are doubles (Dekker, 1971).
    upper = values * _SPLIT
    upper -= upper - values
    lower = values - upper
    product = values * power
    error = ((upper * upper_power - product) + upper * lower_power + lower * upper_power) + lower * lower_power
    change = ((near - product) - error - values * beyond + missing) / power
    is_sure = values + change * (1 + _UNSURE) == values + change * (1 - _UNSURE)
    return values + change, is_sure


def _u64(number: int) -> np.uint64:
    return np.uint64(number)


_ZEROS, _ABOVE_NINE, _HIGH_BITS = (_u64(int.from_bytes([byte] * 8)) for byte in (_ZERO, 0x76, 0x80))


def _masks() -> list[NDArray[np.uint64]]:
    """Return for each word, by length and place of the point, the bytes that are digits; the last word first."""
    place = np.arange(_LONGEST)
    lengths, behind = np.arange(_LONGEST + 1)[:, None, None], np.arange(_LONGEST + 2)[None, :, None]
    # Characters counted from behind.
    is_digit = ((place < lengths) & (place != behind - 1)) * np.uint8(255)
    parts = (is_digit[..., begin : begin + 8][..., ::-1] for begin in range(0, _LONGEST, 8))
    return [np.ascontiguousarray(part).view("<u8").astype(np.uint64).ravel() for part in parts]


def _powers() -> Floats:
    """Return powers of ten as doubles, their upper and lower halves, and what the doubles lack."""
    exact = [10**power for power in range(_MOST_PLACES + 1)]
    doubles = np.array(exact, np.float64)
    upper = doubles * _SPLIT
    upper -= upper - doubles
    beyond = [float(whole - int(double)) for whole, double in zip(exact, doubles, strict=True)]
    return np.stack([doubles, upper, doubles - upper, np.array(beyond)])


_MASKS, _POWERS = _masks(), _powers()
# By the place of the point: what divides digits before it from those after it, and by how much less they then count.
_WHOLE = np.array([10 ** min(behind, 19) for behind in range(_LONGEST + 2)], np.uint64)
_GAPS = np.array([0, *(9 * 10 ** min(behind, 18) for behind in range(_LONGEST + 1))], np.uint64)
