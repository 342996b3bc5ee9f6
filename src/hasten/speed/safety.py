"""How far a lever can be trusted: six classes, defined here, from which code, messages and documentation take them."""

from __future__ import annotations

from enum import StrEnum

# What an automatic choice may change at most: `Trainer(speed="auto")` and the line that needs no consent.
_AUTOMATIC = ("same bits", "same maths up to rounding")


class Safety(StrEnum):
    """What a lever may change in a training; the safest class first.

    The first two train the same model: they are what ``Trainer(speed="auto")`` switches on. Those after them are
    measured and recommended, with the name of the class, and need consent.

    Example::

        >>> [str(each) for each in Safety if each.is_automatic]
        ['same bits', 'same maths up to rounding']
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
    def is_automatic(self) -> bool:
        """Whether ``Trainer(speed="auto")`` may switch it on."""
        return self.value in _AUTOMATIC

    @property
    def words(self) -> str:
        """The class as messages and tables show it: with "needs consent" where it does."""
        return self.value if self.is_automatic else f"{self.value}: needs consent"

    @property
    def means(self) -> str:
        """What the class allows, in one sentence."""
        return _MEANS[self.value]

    @property
    def keeps_batches(self) -> bool:
        """Whether each step sees the samples that it sees without the lever, so that steps can be compared."""
        return self in (Safety.SAME_BITS, Safety.ROUNDING, Safety.LOWER_PRECISION)

    @property
    def loss_tolerance(self) -> float:
        """How far the loss of the first step may be from the unchanged program's, as a share of it."""
        return {"same bits": 1e-5, "same maths up to rounding": 1e-4}.get(self.value, 2e-2)

    @property
    def gradient_tolerance(self) -> float:
        """How far the gradients of the first step may be apart, as a share of their norm."""
        return {"same bits": 1e-4, "same maths up to rounding": 5e-3}.get(self.value, 0.5)

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
    "same bits": "every number is the one it was.",
    "same maths up to rounding": "the same operations on the same samples, summed in another order.",
    "other random draws": "dropout or augmentation draws other numbers, as if from another seed.",
    "same samples in other batches": "each sample comes once an epoch, beside other samples than before.",
    "lower precision": "products are computed with fewer bits.",
    "changes the maths": "another model, loss or optimization is trained.",
}
