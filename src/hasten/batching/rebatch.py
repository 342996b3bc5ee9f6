"""``Trainer(batching=...)``: a user's DataLoader, with samples of like length in each batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.batching.lengths import LengthBatchSampler, PlannedBatches, TokenBatchSampler, positive
from hasten.batching.pad import (
    IGNORED_LABEL,
    MASK_KEY,
    PadCollator,
    default_padding,
    fields_of,
    may_be_classes,
    sequence_key,
    shown,
    with_multiple_of,
)
from hasten.batching.pad_widths import check_multiple_of, widths_for
from hasten.batching.sample_lengths import LengthsNotFoundError, SampleLengths, sample_lengths
from hasten.batching.token_fields import ragged_fields, spread, token_fields
from hasten.batching.trim import FitWidth
from hasten.data.resume.loader_sources import with_attributes
from hasten.seed import isolate_rng

# Without a compiler, shapes cost nothing, and 8 tokens is what tensor cores and vector units like.
FINE = 8
# With one, every width is compiled.
FEW_WIDTHS = 8
STAGES = ("train", "validate", "test", "predict")
# Samples that show which fields differ in size: those that go with the length do so in the first and the last.
FEW_SAMPLES = 16


class CannotJoinError(ValueError):
    """A loader's samples cannot become batches at all, batched by length or not."""


@dataclass(frozen=True)
class LengthBatching:
    """How batches are made of a user's loader, for ``Trainer(batching=...)``.

    Args:
        max_tokens: tokens of a batch, padding included; None keeps the loader's number of samples.
        window: batches that are sorted together; see :class:`~hasten.batching.lengths.LengthBatchSampler`.
        multiple_of: batches that are padded to a mask are cut or filled up to a multiple of so many tokens, or to
            the next of several widths. None takes 8 tokens, and the 8 best widths with ``max_tokens`` or where the
            model is compiled.
        key: the field that tells a sample's length: a key, or a position in a tuple. None looks for a mask, then for
            the sequence.
        reorder: the stages whose samples may come in another order. The others keep theirs, and of their batches only
            padding is cut off. Predictions never change their order.
        over_tokens: the fields of a batch that run over tokens, off which padding may be cut, by key or position, such
            as ``("input_ids", "tags")``. None looks at their names and at the data: cut are fields named so
            (``input_ids``, ``labels``, masks) and those whose values end where the mask ends; where another one is as
            wide and nothing tells, nothing is cut, and a line says so.

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
    key: Any = None
    reorder: Collection[str] = ("train", "validate")
    over_tokens: Collection[Any] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            positive("LengthBatching", "max_tokens", self.max_tokens, "tokens")
        positive("LengthBatching", "window", self.window, "batches")
        check_multiple_of("LengthBatching", self.multiple_of)
        if isinstance(self.over_tokens, str):
            raise TypeError(
                f"LengthBatching(over_tokens={self.over_tokens!r}): give several fields: "
                f"over_tokens=({self.over_tokens!r},)."
            )
        if isinstance(self.reorder, str):
            raise TypeError(
                f"LengthBatching(reorder={self.reorder!r}): give several: reorder=({self.reorder!r},)."
            )
        for stage in self.reorder:
            if stage not in STAGES[:-1]:
                why = "predictions keep the order of the data" if stage == "predict" else "no such stage"
                raise ValueError(
                    f"LengthBatching(reorder={tuple(self.reorder)!r}): {stage!r}: {why}. Use some of "
                    f"{', '.join(map(repr, STAGES[:-1]))}."
                )


def as_batching(owner: str, value: Any) -> LengthBatching | None:
    """Return what ``batching=`` asks for.

    Args:
        owner: whose argument it is, for messages.
        value: None, ``"length"``, ``"tokens:4096"`` or a :class:`LengthBatching`.

    Raises:
        TypeError: it is none of these types.
        ValueError: the words mean nothing.

    Example::

        >>> as_batching("Trainer", "tokens:4096").max_tokens
        4096

    """
    allowed = "'length', 'tokens:4096' (tokens of a batch) or hasten.data.LengthBatching(...)"
    if value is None or isinstance(value, LengthBatching):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{owner}(batching={value!r}): use {allowed}, not {type(value).__name__}.")
    word, colon, number = value.partition(":")
    if value == "length":
        return LengthBatching()
    if word == "tokens" and number.replace("_", "").isdigit() and int(number) > 0:
        return LengthBatching(max_tokens=int(number))
    if word == "tokens":
        raise ValueError(
            f"{owner}(batching={value!r}): say how many tokens a batch has: 'tokens:4096' or another number from 1 on."
        )
    hint = "" if colon else did_you_mean(value, ("length", "tokens"))
    raise ValueError(f"{owner}(batching={value!r}): use {allowed}.{hint}")


def rebatch(
    loader: Any,
    batching: LengthBatching,
    *,
    stage: str = "train",
    name: str | None = None,
    few_shapes: bool = False,
) -> Any:
    """Return a loader of the same samples, in batches of like length; dataset, collate function and workers stay.

    Training batches are shuffled windows sorted by length. Validation goes through the data from the longest to the
    shortest sample, as its figures do not depend on the order; tests and predictions keep theirs
    (``LengthBatching(reorder=...)``). Where batches have a mask, padding that no sample of a batch needs is cut
    off. Only for training it is an error when that cannot be done; elsewhere a line says why, and the loader stays.

    Args:
        loader: a ``DataLoader`` over a dataset with a length.
        batching: how.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        name: what to call the loader in messages.
        few_shapes: choose few widths, because each costs a compilation.

    Raises:
        TypeError: the loader is none whose batches can be made anew.
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
    try:
        return _rebatched(loader, batching, stage, name, few_shapes)
    except (TypeError, ValueError) as error:
        if stage == "train" or isinstance(error, CannotJoinError):
            raise
        rank_zero_info(f"{name} keeps its batches. {error}")
        return loader


def _rebatched(loader: Any, batching: LengthBatching, stage: str, name: str, few_shapes: bool) -> Any:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"batching: {name} is a {type(loader).__name__}, and only the batches of a DataLoader can be made anew. "
            "Give a DataLoader, or leave batching out."
        )
    kind = type(loader.dataset).__name__
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"batching: {name} reads {kind}, an IterableDataset, whose lengths are known only when its samples have "
            "come. Use a dataset with __getitem__ and __len__, or sort within the dataset and leave batching out."
        )
    if isinstance(loader.batch_sampler, PlannedBatches):
        return loader
    if loader.batch_sampler is None:
        raise TypeError(
            f"batching: {name} has batch_size=None, so it makes no batches. Give it a batch_size, or leave "
            "batching out."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise TypeError(
            f"batching: {name} has a batch_sampler of its own, {type(loader.batch_sampler).__name__}. Give "
            "DataLoader(batch_size=..., shuffle=True) instead of it, or leave batching out."
        )
    found = _lengths(loader, batching, name)
    if not len(found.lengths):
        return loader  # An empty dataset is reported as such.
    lengths = found.lengths
    if int(lengths.min()) == int(lengths.max()):
        raise ValueError(
            f"batching: every sample of {name} ({kind}) has the length {int(lengths[0])}"
            f"{'' if found.in_tokens else ' (characters)'}, so there is nothing to gain. Leave batching out; where "
            "samples are padded on the right, give them an attention_mask, or name the field that tells their "
            "length: batching=hasten.data.LengthBatching(key=...)."
        )
    multiple_of = batching.multiple_of
    if multiple_of is None:
        # A budget of tokens has few widths anyhow.
        few = few_shapes or batching.max_tokens is not None
        multiple_of = widths_for(lengths, FEW_WIDTHS, multiple_of=FINE) if few else FINE
    changed = _collated(loader, batching, found, multiple_of, name)
    if stage in batching.reorder:
        changed |= _batched(loader, batching, found, multiple_of if few_shapes else None, stage, name)
    return with_attributes(loader, **changed)


def _lengths(loader: DataLoader[Any], batching: LengthBatching, name: str) -> SampleLengths:
    kind = type(loader.dataset).__name__
    try:
        found = sample_lengths(loader.dataset, batching.key, name=name)
    except LengthsNotFoundError as error:
        raise ValueError(
            f"batching: the lengths of {name} are not found: {kind}: {error}. Give the dataset an attribute `lengths` "
            "(tokens of each sample), or name the field: batching=hasten.data.LengthBatching(key=...)."
        ) from error
    if batching.max_tokens is not None and not found.in_tokens:
        raise ValueError(
            f"batching: {name} ({kind}) gives text, whose tokens cannot be counted before they are made. Use "
            "batching='length', which sorts by characters, or tokenise in the dataset."
        )
    return found


def _collated(
    loader: DataLoader[Any],
    batching: LengthBatching,
    found: SampleLengths,
    multiple_of: int | Sequence[int],
    name: str,
) -> dict[str, Any]:
    dataset, lengths, collate_fn = loader.dataset, found.lengths, cast(Any, loader.collate_fn)
    if collate_fn is default_collate or isinstance(collate_fn, PadCollator):
        with isolate_rng(include_cuda=False):
            samples = [dataset[index] for index in spread(lengths, FEW_SAMPLES)]
        if collate_fn is default_collate and _differ_in_size(samples):
            # Torch's own cannot join them: without this, no batch of more than one sample would exist.
            _check_kinds(found, name)
            collate_fn = _padding_for(samples, name)
        if isinstance(collate_fn, PadCollator):
            collate_fn = collate_fn.decided(ragged_fields(samples))
    collate_fn = with_multiple_of(collate_fn, multiple_of)
    # Only a mask says what may be cut; a batch without one stays as wide as the collate function makes it.
    return {
        "collate_fn": FitWidth(
            collate_fn,
            mask_key=found.mask_key,
            multiple_of=multiple_of,
            limit=int(lengths.max()) if found.in_tokens else None,
            over_tokens=_over_tokens(loader, batching, found, collate_fn, name),
        )
    }


def _over_tokens(
    loader: DataLoader[Any], batching: LengthBatching, found: SampleLengths, collate_fn: Any, name: str
) -> Collection[Any]:
    """Return the fields off which padding may be cut, and say which they are."""
    if batching.over_tokens is not None:
        return batching.over_tokens
    try:
        fields = token_fields(loader, found.lengths, collate_fn, found.mask_key)
    except Exception as error:
        # The user's code may want other batches than these. If it fails in training too, it says so there.
        rank_zero_info(
            f"batching: no padding is cut off {name}: no batch could be made to look at ({type(error).__name__}: "
            f"{error}). Name the fields that run over tokens: batching=hasten.data.LengthBatching(over_tokens=(...))."
        )
        return ()
    if fields.doubtful:
        named = tuple(key for key in fields.over_tokens if key != found.mask_key)
        rank_zero_info(
            f"batching: no padding is cut off {name}: {shown(*fields.doubtful)} is as wide as the mask, and nothing "
            "tells whether it runs over tokens. Name the fields that do: "
            f"batching=hasten.data.LengthBatching(over_tokens={named!r})."
        )
        return ()
    cut = [key for key in fields.over_tokens if key != found.mask_key]
    if not cut:
        return ()  # Nothing goes with the mask.
    if not isinstance(collate_fn, PadCollator):  # That one makes no batch wider than it must be.
        rank_zero_info(
            f"batching: columns that are padding for a whole batch of {name} are cut off {shown(*fields.over_tokens)}."
        )
    return fields.over_tokens


def _differ_in_size(samples: list[Any]) -> bool:
    """Return whether samples have tensors of different sizes, which torch does not join."""
    try:
        default_collate(samples)
    except (RuntimeError, TypeError):
        return True
    return False


def _check_kinds(found: SampleLengths, name: str) -> None:
    """Check that no field is a sequence here and a single value there.

    Raises:
        CannotJoinError: one is.

    """
    for key, (one, other) in found.mixed.items():
        raise CannotJoinError(
            f"batching: {shown(key)} is a sequence in sample {one} of {name} and a single value in sample {other}. "
            "Give every sample the same kind of value, or the loader a collate_fn that joins them."
        )


def _padding_for(samples: list[Any], name: str) -> PadCollator:
    """Return what joins samples of different sizes where the user gave nothing, and say how.

    Raises:
        CannotJoinError: a field may be labels, and nobody said what pads them.

    """
    ragged = ragged_fields(samples)
    rows = [fields_of(sample) or {} for sample in samples]
    main = sequence_key(samples[0])
    for key in ragged - {main, MASK_KEY}:
        values = [row[key] for row in rows]
        if may_be_classes(key, values):
            kind = torch.as_tensor(max(values, key=len)).dtype
            raise CannotJoinError(
                f"batching: the samples of {name} differ in size, and nothing tells what pads {shown(key)} ({kind}). "
                "If these are labels of tokens, give the loader "
                f"collate_fn=hasten.data.PadCollator(padding={{{key!r}: {IGNORED_LABEL}}}), and a loss leaves padding "
                "out; if they are ids, 0 or another value."
            )
    padding = ", ".join(f"{shown(key)} with {default_padding(key)}" for key in rows[0] if key in ragged)
    rank_zero_info(
        f"batching: the samples of {name} differ in size and are padded{f': {padding}' if padding else ''}. For other "
        "values, give the loader collate_fn=hasten.data.PadCollator(padding={...})."
    )
    return PadCollator()


def _batched(
    loader: DataLoader[Any],
    batching: LengthBatching,
    found: SampleLengths,
    widths: int | Sequence[int] | None,
    stage: str,
    name: str,
) -> dict[str, Any]:
    """Return the loader's attributes that make its batches."""
    sampler, batches = loader.sampler, loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    in_order = type(sampler) is SequentialSampler
    plain = in_order or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    generator = getattr(sampler, "generator", None) if plain else None
    lengths = found.lengths
    # Without the user's sampler in it, the loader keeps none that somebody could take for the order of its samples.
    sampler_left: Any = SequentialSampler(loader.dataset) if plain else sampler  # type: ignore[arg-type]
    if batching.max_tokens is not None:
        if not plain:
            raise ValueError(
                f"batching: {name} has a {type(sampler).__name__}, and batches of so many tokens take every sample "
                "once. Use batching='length', which keeps the sampler, or shuffle=True instead of it."
            )
        planned: PlannedBatches = TokenBatchSampler(
            lengths,
            _max_tokens(batching.max_tokens, lengths, name),
            not in_order,
            drop_last=batches.drop_last,
            generator=generator,
        )
        return {"batch_sampler": planned, "sampler": sampler_left, "batch_size": None}
    window = batching.window
    if in_order and stage != "train":
        window = -(-len(lengths) // batches.batch_size)
    planned = LengthBatchSampler(
        lengths,
        batches.batch_size,
        not in_order,
        window=window,
        multiple_of=widths,
        drop_last=batches.drop_last,
        generator=generator,
        sampler=None if plain else sampler,
    )
    return {"batch_sampler": planned, "sampler": sampler_left}


def _max_tokens(max_tokens: int, lengths: Tensor, name: str) -> int:
    longest = int(lengths.max())
    if longest > max_tokens:
        raise ValueError(
            f"batching='tokens:{max_tokens}': sample {int(lengths.argmax())} of {name} has {longest} tokens. Use "
            f"'tokens:{longest}' or more, or truncate."
        )
    return max_tokens
