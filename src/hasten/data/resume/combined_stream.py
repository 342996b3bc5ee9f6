"""CombinedStream: several streams read as one, whose position can be saved and restored exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hasten.data.combined import CombinedLoader, joint_length
from hasten.data.resume.stream import Stream

_END: Any = object()


class CombinedStream:
    """The batches of a ``CombinedLoader``, epoch after epoch; what ``Stream`` is for one loader.

    Args:
        loader: defines how the streams are joined.
        streams: one for each of its loaders, in the order of ``loader.flattened``.
        name: what to call it in messages.

    Example::

        >>> loader = CombinedLoader([range(3), range(2)], mode="max_size_cycle")
        >>> stream = CombinedStream(loader, [Stream(range(3)), Stream(range(2))])
        >>> list(stream.batches())
        [([0, 0], False), ([1, 1], False), ([2, 0], True)]

    """

    def __init__(
        self, loader: CombinedLoader, streams: list[Stream], *, name: str = "train_dataloader"
    ) -> None:
        self.loader = loader
        self.name = name
        self._readers = [_Reader(stream) for stream in streams]
        self._loaded: dict[str, Any] | None = None
        self._handed = 0
        self._at_end = False
        self._resumes = False

    @property
    def length(self) -> int | None:
        """The number of batches according to the loaders' lengths; None if one has none."""
        return joint_length(self.loader.mode, [reader.stream.length for reader in self._readers])

    @property
    def certain_length(self) -> int | None:
        """The number of batches that an epoch is sure to have; None if it is known only at the end."""
        return joint_length(self.loader.mode, [reader.stream.certain_length for reader in self._readers])

    @property
    def position(self) -> int:
        """The number of batches of the epoch already consumed; 0 between epochs."""
        if self._loaded is not None:
            return 0 if self._loaded["ended"] else self._loaded["consumed"]
        return 0 if self._at_end else self._handed

    @property
    def worker_start_seconds(self) -> float | None:
        """How long the processes of all its loaders took to start, the last time; None without any."""
        found = [reader.stream.worker_start_seconds for reader in self._readers]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if known else None

    # -- the batches

    def batches(self, limit: int | None = None) -> Iterator[tuple[Any, bool]]:
        """Yield ``(batch, is_last)`` of a new epoch, or of the rest of the one that a loaded state is in.

        Args:
            limit: end the epoch after this many batches, counted from its start.

        """
        self.open()
        if not self._resumes:
            for reader in self._readers:
                reader.restart()
            self._handed = 0
        self._resumes, self._at_end = False, False
        ends = [number for number in (self.certain_length, limit) if number is not None]
        end = min(ends) if ends else None
        rounds = self._one_by_one if self.loader.mode == "sequential" else self._side_by_side
        try:
            if end is None or self._handed < end:
                for batch, is_last in rounds(end):
                    self._handed += 1
                    self._at_end = is_last or self._handed == end
                    yield batch, self._at_end
                    if self._at_end:
                        break
            self._at_end = True
        finally:
            for reader in self._readers:
                reader.leave()

    def _side_by_side(self, end: int | None) -> Iterator[tuple[Any, bool]]:
        cycles, shortest = self.loader.mode == "max_size_cycle", self.loader.mode == "min_size"
        readers = self._readers
        while True:
            batches: list[Any] = []
            for reader in readers:
                if reader.at_end and cycles:
                    reader.again()
                batch = reader.next(end, self._handed)
                if batch is _END and cycles:
                    reader.again()
                    batch = reader.next(end, self._handed)
                batches.append(batch)
            ends_early = [batch is _END for batch in batches]
            if all(ends_early) or (shortest and any(ends_early)):
                return
            batches = [None if batch is _END else batch for batch in batches]
            enough = any if shortest else all
            yield self.loader.combine(batches), enough(reader.done for reader in readers)

    def _one_by_one(self, end: int | None) -> Iterator[tuple[Any, bool]]:
        for index, reader in enumerate(self._readers):
            last_reader = index == len(self._readers) - 1
            for other in self._readers:
                other.took = False
            while (batch := reader.next(end, self._handed)) is not _END:
                yield batch, reader.at_end and last_reader

    # -- the position

    def open(self) -> None:
        """Go to the position of a loaded state now, if there is one: start workers, skip what was consumed."""
        state = self._loaded
        if state is None:
            return
        self._loaded = None
        for reader, saved in zip(self._readers, state["readers"], strict=True):
            reader.at_end, reader.done, reader.count = saved["at_end"], saved["done"], saved["count"]
            if saved["at_end"] or state["ended"]:
                reader.stream.finish()
            else:
                reader.stream.open()
        self._handed, self._at_end = state["consumed"], state["ended"]
        self._resumes = not state["ended"]

    @property
    def handed(self) -> int:
        """How many joint batches of the epoch were handed out."""
        return self._handed

    def replace_held(self, change: Callable[[Any], Any]) -> None:
        """Change the last batches for ``state_dict(again=True)``."""
        for reader in self._readers:
            reader.stream.replace_held(change)

    def state_dict(self, consumed: int, *, again: bool = False) -> dict[str, Any]:
        """Return the position after ``consumed`` batches of this epoch; see ``Stream.state_dict``."""
        if self._loaded is not None:
            return self._loaded
        again = again or (not (self._at_end and consumed == 0) and consumed == self._handed - 1)
        if not again and consumed != self._handed and not self._at_end:
            raise ValueError(
                f"{self.name}: state_dict(consumed={consumed}), but {self._handed} batches were handed out."
            )
        return {
            "consumed": self._handed - again,
            "ended": self._at_end and not again,
            "readers": [reader.state_dict(again) for reader in self._readers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where ``state_dict`` was taken, at the next ``open()`` or ``batches()``.

        Raises:
            ValueError: the state has another number of loaders.

        """
        readers = state.get("readers", [])
        if len(readers) != len(self._readers):
            raise ValueError(
                f"{self.name}: the checkpoint was written with {max(1, len(readers))} loader(s), and there are "
                f"{len(self._readers)} now. Resume with the same loaders."
            )
        for reader, saved in zip(self._readers, readers, strict=True):
            reader.restart()
            reader.stream.load_state_dict(saved["stream"])
        self._loaded = state

    def start_at(self, consumed: int) -> None:
        """Begin the next epoch after its first ``consumed`` batches, where no exact state is known."""
        left = consumed
        states: list[dict[str, Any]] = []
        for reader in self._readers:
            length, mode = reader.stream.length, self.loader.mode
            done = length is not None and consumed >= length
            count = consumed
            if length is not None and mode == "max_size_cycle" and length:
                count = consumed % length
            elif length is not None and mode == "max_size":
                count = min(consumed, length)
            elif length is not None and mode == "sequential":
                count = min(left, length)
                left -= count
                done = count == length
            reader.stream.start_at(count)
            at_end = done and mode in ("max_size", "sequential")
            states.append(
                {"stream": reader.stream.state_dict(count), "at_end": at_end, "done": done, "count": count}
            )
        self._loaded = {"consumed": consumed, "ended": False, "readers": states}

    def finish(self) -> None:
        """Give up the rest of the epoch of a loaded state; the next batches are those of a new epoch."""
        if self._loaded is None:
            return
        self._loaded = {**self._loaded, "ended": True}
        self.open()
        self._at_end = True

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch(epoch)`` of the samplers and datasets of all loaders."""
        for reader in self._readers:
            reader.stream.set_epoch(epoch)

    def close(self) -> None:
        """End the worker processes now; the next epoch starts new ones."""
        for reader in self._readers:
            reader.leave()
            reader.stream.close()


class _Reader:
    """One of the streams, and how much of it the joint epoch has read."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.restart()

    def restart(self) -> None:
        """Be at the beginning of a joint epoch."""
        self.batches: Iterator[tuple[Any, bool]] | None = None
        self.count = 0
        self.at_end = self.done = self.took = self.was_done = False

    def again(self) -> None:
        """Begin the stream's next own epoch inside a joint one."""
        self.batches, self.count, self.at_end = None, 0, False

    def next(self, end: int | None, handed: int) -> Any:
        """Return the next batch; ``_END`` past the end, also if that comes before the stream's length."""
        self.took, self.was_done = not self.at_end, self.done
        if self.at_end:
            return _END
        if self.batches is None:
            # The joint epoch may end before this stream's own: the limit makes its state that of an end.
            left = None if end is None else end - (handed - self.count)
            length = self.stream.certain_length
            cut = left if left is not None and (length is None or left < length) else None
            self.batches = self.stream.batches(cut)
        for batch, is_last in self.batches:
            self.count += 1
            self.at_end = is_last
            self.done = self.done or is_last
            return batch
        self.at_end, self.done, self.took = True, True, False
        return _END

    def leave(self) -> None:
        """Leave the stream's epoch where it is."""
        batches, self.batches = self.batches, None
        if batches is not None:
            batches.close()  # type: ignore[attr-defined]

    def state_dict(self, again: bool) -> dict[str, Any]:
        """Return the stream's position; ``again``: before the last joint batch."""
        back = again and self.took
        stream = (
            self.stream.state_dict(self.count - back, again=back) if self.count else self.stream.state_dict(0)
        )
        return {
            "stream": stream,
            "at_end": self.at_end and not back,
            "done": self.was_done if back else self.done,
            "count": self.count - back,
        }
