"""``Trainer(batching=...)``: put samples of similar length into the same batch of a user's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.batching.fields import FitWidth, fields_over_tokens, ragged_fields, spread
from hasten.batching.pad import (
    IGNORED_LABEL,
    MASK_KEY,
    PadCollator,
    check_multiple_of,
    default_padding,
    fields_of,
    may_be_classes,
    sequence_key,
    shown,
    widths_for,
)
from hasten.batching.sample_lengths import LengthsNotFoundError, SampleLengths, sample_lengths
from hasten.batching.samplers import LengthBatchSampler, PlannedBatches, TokenBatchSampler
from hasten.data.loader_parts import (
    check_dataloader,
    required_in_training,
    sampler_of,
    takes_each_once,
    with_attributes,
)
from hasten.data.memory.dataset_parts import preserve
from hasten.seed import isolate_rng

# Without a compiler, shapes cost nothing, and multiples of 8 tokens suit tensor cores and vector units.
FINE = 8
# With a compiler, every width is compiled.
FEW_WIDTHS = 8
STAGES = ("train", "validate", "test")
# Number of samples that are compared to see which fields differ in size.
FEW_SAMPLES = 16


_Loader = TypeVar("_Loader")


class CannotJoinError(ValueError):
    """A loader's samples cannot become batches at all, batched by length or not."""


@dataclass(frozen=True)
class LengthBatching:
    """How batches are made of a user's loader, for ``Trainer(batching=...)``.

    Args:
        max_tokens: tokens of a batch, padding included; None keeps the loader's number of samples.
        window: batches that are sorted together; see :class:`~hasten.data.LengthBatchSampler`.
        multiple_of: batches with a mask are cut or filled up to a multiple of so many tokens, or to the next of
            several widths. None takes 8 tokens, and the 8 best widths with ``max_tokens`` or if the model is compiled.
        key: the field with a sample's length: a key, or a position in a tuple. None looks for a mask, then for
            the sequence.
        reorder: the stages whose samples may come in another order. In the others, only padding is cut off.
            Predictions never change their order.
        over_tokens: the fields of a batch that run over tokens, off which padding may be cut, by key or position, such
            as ``("input_ids", "tags")``. None takes all that are as wide as the mask, but for matrices of floats, which
            may be features; the log names them.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range.

    Example::

        >>> LengthBatching(max_tokens=4096, reorder=("train",)).window
        50

    """

    max_tokens: int | None = None
    window: int = 50
    multiple_of: int | Sequence[int] | None = None
    key: Hashable = None
    reorder: Collection[Literal["train", "validate", "test"]] = ("train", "validate")
    over_tokens: Collection[Any] | None = None

    def __post_init__(self) -> None:
        owner = "LengthBatching"
        check.whole(owner, "max_tokens", self.max_tokens, at_least=1, unit="tokens", allow_none=True)
        check.whole(owner, "window", self.window, at_least=1, unit="batches")
        check_multiple_of(owner, self.multiple_of)
        for name in ("over_tokens", "reorder"):
            value = getattr(self, name)
            what = "a list of fields" if name == "over_tokens" else "a list of stages"
            check.instance(owner, name, value, Collection, what, allow_none=name == "over_tokens")
            if isinstance(value, (str, bytes)):
                raise make_error(
                    TypeError, f"{owner}({name}={value!r}):", fix=f"give several: {name}=({value!r},).", argument=name
                )
        check.instance(owner, "key", self.key, Hashable, "a key of a batch, or a position in it")
        if not all(isinstance(stage, str) and stage in STAGES for stage in self.reorder):
            allowed = f"some of {', '.join(map(repr, STAGES))} (predictions keep the order of the data)"
            raise check.wrong(owner, "reorder", tuple(self.reorder), allowed)


def as_batching(owner: str, value: LengthBatching | str | None) -> LengthBatching | None:
    """Return the ``LengthBatching`` that the argument ``batching`` stands for."""
    if value is None or isinstance(value, LengthBatching):
        return value
    allowed = "'length', 'tokens:4096' (tokens of a batch) or hasten.data.LengthBatching(...)"
    check.instance(owner, "batching", value, str, allowed)
    word, colon, number = value.partition(":")
    if value == "length":
        return LengthBatching()
    if word == "tokens" and number.replace("_", "").isdigit() and int(number) > 0:
        return LengthBatching(max_tokens=int(number))
    hint = "" if colon else did_you_mean(value, ("length",) if value == "tokens" else ("length", "tokens"))
    raise check.wrong(owner, "batching", value, allowed, hint=hint)


def rebatch(
    loader: _Loader,
    batching: LengthBatching,
    *,
    stage: str = "train",
    name: str | None = None,
    few_shapes: bool = False,
) -> _Loader:
    """Return a loader of the same samples, in batches of like length; dataset, collate function and workers stay.

    Training batches are shuffled windows sorted by length. Validation goes through the data from the longest to the
    shortest sample, as its figures do not depend on the order; tests and predictions keep theirs
    (``LengthBatching(reorder=...)``). If batches have a mask, padding that no sample of a batch needs is cut off.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        batching: how.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``. In training it is an error if the loader
            cannot be batched by length; otherwise the reason is logged, and the loader is returned unchanged.
        name: what to call the loader in messages.
        few_shapes: choose few widths, because each costs a compilation.

    Raises:
        TypeError: the loader's batches cannot be changed.
        ValueError: no lengths are found, or batching by length would change nothing.

    Example::

        >>> import torch
        >>> from hasten.batching.pad import pad_collate
        >>> data = [torch.arange(length) for length in (2, 9, 3, 8)]
        >>> loader = DataLoader(data, batch_size=2, collate_fn=pad_collate)
        >>> [batch.shape[1] for batch in loader], [batch.shape[1] for batch in rebatch(loader, LengthBatching())]
        ([9, 8], [9, 3])

    """
    name = name or f"the {stage} dataloader"

    def change() -> Any:
        return _rebatched(loader, batching, stage, name, few_shapes)

    return required_in_training(change, loader, stage, name, always=(CannotJoinError,))


def _rebatched(loader: Any, batching: LengthBatching, stage: str, name: str, few_shapes: bool) -> Any:
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, PlannedBatches):
        return loader
    check_dataloader(loader, "batching", name, iteration=False, numbered=True)
    dataset: Any = loader.dataset
    shown_data = f"{name} ({type(dataset).__name__})"
    if type(loader.batch_sampler) is not BatchSampler:
        what = f"batching: {name} has its own batch_sampler, a {type(loader.batch_sampler).__name__}."
        fix = "Give DataLoader(batch_size=..., shuffle=True) instead of it, or leave batching out."
        raise make_error(TypeError, what, fix=fix, argument="batching")
    try:
        found = sample_lengths(dataset, batching.key, name=name)
    except LengthsNotFoundError as error:
        raise make_error(
            ValueError,
            f"batching: the lengths of {shown_data} are not found: {error}.",
            fix=(
                "Give the dataset an attribute `lengths` (tokens of each sample), or name the field: "
                "batching=hasten.data.LengthBatching(key=...)."
            ),
            argument="batching",
        ) from error
    lengths = found.lengths
    if batching.max_tokens is not None and not found.in_tokens:
        what = f"batching: {shown_data} gives text, whose tokens are not known yet."
        fix = "Use batching='length', which sorts by characters, or tokenize in the dataset."
        raise make_error(ValueError, what, fix=fix, argument="batching")
    if not len(lengths):
        return loader  # An empty dataset is reported later.
    if int(lengths.min()) == int(lengths.max()):
        what = f"batching: every sample of {shown_data} has the length {int(lengths[0])}, so there is nothing to gain."
        fix = "Leave batching out, or name the field with the length: batching=hasten.data.LengthBatching(key=...)."
        raise make_error(ValueError, what, fix=fix, argument="batching")
    multiple_of = batching.multiple_of
    if multiple_of is None:
        multiple_of = _widths(batching, lengths, few_shapes)
    collate_fn = _joining(loader, found, multiple_of, name)
    # Only a mask shows which columns may be cut; a batch without a mask keeps its width.
    fitting = FitWidth(
        collate_fn,
        mask_key=found.mask_key,
        multiple_of=multiple_of,
        limit=int(lengths.max()) if found.in_tokens else None,
        over_tokens=_over_tokens(loader, found, collate_fn, name)
        if batching.over_tokens is None
        else batching.over_tokens,
    )
    new = with_attributes(loader, collate_fn=fitting)
    if stage not in batching.reorder:
        return new
    return _reordered(new, batching, lengths, multiple_of if few_shapes else None, stage, name)


def _widths(batching: LengthBatching, lengths: Tensor, few_shapes: bool) -> int | Sequence[int]:
    # Batches by tokens have few widths anyway.
    few = few_shapes or batching.max_tokens is not None
    return widths_for(lengths, FEW_WIDTHS, multiple_of=FINE) if few else FINE


def _joining(
    loader: DataLoader[Any], found: SampleLengths, multiple_of: int | Sequence[int] | None, name: str
) -> Callable[[list[Any]], Any]:
    """Return the loader's collate function, or one that pads if it has none."""
    collate_fn: Callable[[list[Any]], Any] = loader.collate_fn
    if collate_fn is not default_collate and not isinstance(collate_fn, PadCollator):
        return collate_fn
    with isolate_rng(include_cuda=False), preserve(loader.dataset):
        samples = [loader.dataset[index] for index in spread(found.lengths, FEW_SAMPLES)]
    if collate_fn is default_collate:
        # If torch cannot join them, there would be no batch of more than one sample without padding.
        try:
            default_collate(samples)
        except (RuntimeError, TypeError):
            collate_fn = _padding_for(samples, name)
    if isinstance(collate_fn, PadCollator):
        collate_fn = collate_fn.decided(ragged_fields(samples))
        if collate_fn.multiple_of is None:
            collate_fn.multiple_of = multiple_of
    return collate_fn


def _padding_for(samples: list[Any], name: str) -> PadCollator:
    """Return a collate function for samples of different sizes, and log how it pads them."""
    ragged = ragged_fields(samples)
    rows = [fields_of(sample) or {} for sample in samples]
    for key in ragged - {sequence_key(samples[0]), MASK_KEY}:
        values = [row[key] for row in rows]
        if may_be_classes(key, values):
            kind = torch.as_tensor(max(values, key=len)).dtype
            raise make_error(
                CannotJoinError,
                f"batching: nothing defines what pads {shown(key)} ({kind}) of {name}.",
                fix=(
                    f"If these are labels of tokens, use collate_fn=hasten.data.PadCollator(padding={{{key!r}: "
                    f"{IGNORED_LABEL}}}); if they are ids, 0."
                ),
                argument="batching",
            )
    padding = ", ".join(f"{shown(key)} with {default_padding(key)}" for key in rows[0] if key in ragged)
    rank_zero_info(
        f"batching: the samples of {name} differ in size and are padded{f': {padding}' if padding else ''}. For other "
        "values, give the loader collate_fn=hasten.data.PadCollator(padding={...})."
    )
    return PadCollator()


def _over_tokens(
    loader: DataLoader[Any], found: SampleLengths, collate_fn: Callable[[list[Any]], Any], name: str
) -> Collection[Any]:
    """Return the fields off which padding may be cut, and log which they are."""
    try:
        fields = fields_over_tokens(loader, found.lengths, collate_fn, found.mask_key)
    except Exception as error:
        # The user's code may need other batches than these. If it fails in training too, it is reported there.
        rank_zero_info(
            f"batching: no padding is cut off {name}: its longest samples made no batch ({type(error).__name__}: "
            f"{error}). Name the fields: batching=hasten.data.LengthBatching(over_tokens=(...))."
        )
        return ()
    if fields == (found.mask_key,):
        return ()
    if fields and not isinstance(collate_fn, PadCollator):  # Its batches are as narrow as possible.
        rank_zero_info(
            f"batching: columns that are padding for a whole batch of {name} are cut off {shown(*fields)}. To name "
            "others: batching=hasten.data.LengthBatching(over_tokens=(...))."
        )
    return fields


def _reordered(
    loader: DataLoader[Any],
    batching: LengthBatching,
    lengths: Tensor,
    widths: int | Sequence[int] | None,
    stage: str,
    name: str,
) -> DataLoader[Any]:
    """Return the loader with batches of samples of like length."""
    sampler, batches = sampler_of(loader), cast(Any, loader.batch_sampler)
    in_order, plain = type(sampler) is SequentialSampler, takes_each_once(loader)
    options: dict[str, Any] = {
        "drop_last": batches.drop_last,
        "generator": getattr(sampler, "generator", None) if plain else None,
    }
    if plain:
        # The loader does not keep the user's sampler, which could be taken for the order of its samples.
        loader = with_attributes(loader, sampler=SequentialSampler(cast(Any, loader.dataset)))
    most = batching.max_tokens
    if most is None:
        window = batching.window
        if in_order and stage != "train":
            window = -(-len(lengths) // batches.batch_size)
        options |= {"window": window, "multiple_of": widths, "sampler": None if plain else sampler}
        by_length = LengthBatchSampler(lengths, batches.batch_size, not in_order, **options)
        return with_attributes(loader, batch_sampler=by_length)
    if not plain:
        what = f"batching: {name} has a {type(sampler).__name__}, and batches of so many tokens take every sample once."
        fix = "Use batching='length', which keeps the sampler, or shuffle=True instead of it."
        raise make_error(ValueError, what, fix=fix, argument="batching")
    longest = int(lengths.max())
    if longest > most:
        what = f"batching='tokens:{most}': sample {int(lengths.argmax())} of {name} has {longest} tokens."
        raise make_error(ValueError, what, fix=f"Use 'tokens:{longest}' or more, or truncate.", argument="batching")
    by_tokens = TokenBatchSampler(lengths, most, not in_order, **options)
    return with_attributes(loader, batch_sampler=by_tokens, batch_size=None)
