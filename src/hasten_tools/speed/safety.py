"""The six classes of speed-ups, by what they may change. Code, messages and documentation take them from here."""

from __future__ import annotations

from enum import StrEnum

from hasten.arguments import SPEEDS


class Safety(StrEnum):
    """What a speed-up may change in a training; the safest class first.

    The first three train the same model as from this seed or another: ``Trainer(speed="auto")`` may switch them on, and
    ``speed="exact"`` the first two. The others need consent: the name of the class as ``speed``.

    Example::

        >>> [str(each) for each in Safety if each.is_automatic]
        ['same bits', 'same maths up to rounding', 'other random draws']
        >>> Safety("lower precision") > Safety.ROUNDING
        True

    """

    SAME_BITS = "same bits"
    ROUNDING = "same maths up to rounding"
    OTHER_DRAWS = "other random draws"
    OTHER_BATCHES = "same samples in other batches"
    LOWER_PRECISION = "lower precision"
    OTHER_MATHS = "changes the maths"

    @property
    def means(self) -> str:
        """What the class allows, in one sentence."""
        return _MEANS[self]

    @property
    def is_automatic(self) -> bool:
        """Whether ``Trainer(speed="auto")`` may switch it on."""
        return self <= Safety.OTHER_DRAWS

    @property
    def limit(self) -> str:
        """What the class may change at most, as part of a sentence."""
        known = {Safety.ROUNDING: "rounding", Safety.OTHER_DRAWS: "rounding and random draws"}
        return known.get(self, self.value)

    @classmethod
    def of_speed(cls, speed: str) -> Safety:
        """Return what ``Trainer(speed=...)`` may change at most.

        Example::

            >>> Safety.of_speed("auto")
            <Safety.OTHER_DRAWS: 'other random draws'>

        """
        return cls(SPEEDS[speed])

    @property
    def words(self) -> str:
        """The class as messages and tables show it: with "needs consent" if it does."""
        return self.value if self.is_automatic else f"{self.value}: needs consent"

    @property
    def keeps_batches(self) -> bool:
        """Whether each step reads the same samples as without the speed-up, so that steps can be compared."""
        return self in (Safety.SAME_BITS, Safety.ROUNDING, Safety.LOWER_PRECISION)

    @property
    def loss_tolerance(self) -> float:
        """How far the loss of the first step may be from the unchanged program's, as a share of it."""
        return {Safety.SAME_BITS: 1e-5, Safety.ROUNDING: 1e-4}.get(self, 2e-2)

    @property
    def gradient_tolerance(self) -> float:
        """How far apart the gradients of the first step may be, as a share of their norm."""
        return {Safety.SAME_BITS: 1e-4, Safety.ROUNDING: 5e-3}.get(self, 0.5)

    # As text they would be compared by their letters.
    def __lt__(self, other: str) -> bool:
        return self._rank < Safety(other)._rank

    def __gt__(self, other: str) -> bool:
        return self._rank > Safety(other)._rank

    def __le__(self, other: str) -> bool:
        return self._rank <= Safety(other)._rank

    def __ge__(self, other: str) -> bool:
        return self._rank >= Safety(other)._rank

    @property
    def _rank(self) -> int:
        return list(Safety).index(self)


_MEANS = {
    Safety.SAME_BITS: "every number stays the same.",
    Safety.ROUNDING: "the same operations on the same samples, summed in another order.",
    Safety.OTHER_DRAWS: "dropout or augmentation draws other numbers, as if from another seed.",
    Safety.OTHER_BATCHES: "each sample comes once an epoch, in a batch with other samples than before.",
    Safety.LOWER_PRECISION: "products are computed with fewer bits.",
    Safety.OTHER_MATHS: "another model, loss or optimization is trained.",
}
