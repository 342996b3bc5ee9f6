"""Pack several sequences into one row, with hardly any padding; no sequence attends to another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.batching.pad import (
    IGNORED_LABEL,
    MASK_KEY,
    check_same_fields,
    default_padding,
    is_sequence,
    of_one_type,
    rounded_up,
    sequence_key,
    tensor_of,
)
from hasten.batching.samplers import rows_of
from hasten.packed.document_attention import document_mask


def pack(
    samples: Sequence[Any],
    max_length: int | None = None,
    *,
    rows: int | None = None,
    next_token: bool = True,
    padding: Mapping[Any, Any] | None = None,
    multiple_of: int | None = None,
) -> dict[str, Any]:
    """Concatenate sequences into rows, with everything that a model needs to separate them.

    Args:
        samples: dicts with ``input_ids`` (or another sequence, see :class:`~hasten.batching.pad.PadCollator`), or
            sequences of tokens themselves. Fields as long as the sequence are packed with it; the others are
            stacked, one entry for each document, in the documents' order. Where an ``attention_mask`` has 0, at the
            beginning or end of a sample, is padding, which is left out.
        max_length: tokens of a row; None puts everything into one row. The samples' order is kept if it needs no
            more rows than another.
        rows: rows of the batch, filled up with empty ones, so that all batches have the same shape.
        next_token: the model predicts each token from those before: ``labels`` are the tokens themselves if a
            sample has none, and the first of each document is -100, so that no loss crosses from one to the next
            (the model shifts labels against its outputs, as Hugging Face models do). False leaves labels unchanged.
        padding: padding value at the end of a row, by field; by default -100 for labels, else 0. Whole numbers of a
            type that cannot hold it, such as labels of type bool, become int64.
        multiple_of: without ``max_length``, the tokens of the row are a multiple of this.

    Returns:
        A dict with

        - ``input_ids`` and the samples' other sequences, ``(rows, time)``;
        - ``position_ids``, ``(rows, time)`` int64: from 0 in each document;
        - ``document_ids``, ``(rows, time)`` int64: from 0 in the whole batch, -1 for padding;
        - ``labels``, ``(rows, time)`` (with ``next_token``), or what the samples have;
        - ``cu_seqlens``, int32: where each sequence begins in the rows laid end to end, then the end, for
          :func:`packed_attention`. A row's padding counts as a sequence, and so does an empty row;
        - ``max_seqlen``, int: the longest of these;
        - ``document_starts``, ``(documents,)`` int64: where each document begins in the rows laid end to end;
        - ``document_order``, ``(documents,)`` int64: which of ``samples`` each document is.

    Raises:
        ValueError: a sample is longer than ``max_length``, more rows are needed than ``rows``, samples have other
            fields, or fields of other sizes, than the first one, or a mask has 0 between tokens.
        TypeError: a sample has no sequence.

    Example::

        >>> batch = pack([[5, 6, 7], [8, 9]], max_length=6)
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["document_ids"].tolist()
        ([[5, 6, 7, 8, 9, 0]], [[0, 1, 2, 0, 1, 0]], [[0, 0, 0, 1, 1, -1]])
        >>> batch["labels"].tolist(), batch["cu_seqlens"].tolist(), batch["max_seqlen"]
        ([[-100, 6, 7, -100, 9, -100]], [0, 3, 5, 6], 3)

    Source: Krell et al., `Efficient sequence packing without cross-contamination
    <https://arxiv.org/abs/2107.02027>`_.

    """
    if not samples:
        raise ValueError("pack(): there are no samples.")
    fields = [dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    columns, main, packed_keys = _columns(fields)
    lengths = list(map(len, columns[main]))
    layout, width = _layout(lengths, max_length, rows, multiple_of)
    order = [place for row in layout for place in row]
    batch: dict[str, Any] = {}
    for key, values in columns.items():
        if key in packed_keys:
            _check_shapes(key, [each.shape[1:] for each in values], main)
            value = (padding or {}).get(key, default_padding(key))
            batch[key] = _laid_out(of_one_type(values, value), layout, width, value)
        else:
            _check_shapes(key, [each.shape for each in values], main)
            batch[key] = torch.stack([values[place] for place in order])
    batch["position_ids"] = _laid_out([torch.arange(length) for length in lengths], layout, width, 0)
    numbers = {place: torch.full((lengths[place],), number) for number, place in enumerate(order)}
    batch["document_ids"] = _laid_out(numbers, layout, width, -1)
    if next_token:
        _cut_labels(batch, main, packed_keys)
    starts, ends = _bounds(lengths, layout, width)
    batch["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    batch["max_seqlen"] = max(after - before for before, after in pairwise(ends))
    batch["document_starts"] = torch.tensor(starts, dtype=torch.int64)
    batch["document_order"] = torch.tensor(order, dtype=torch.int64)
    return batch


def _columns(fields: list[dict[Any, Any]]) -> tuple[dict[Any, list[Tensor]], Hashable, list[Any]]:
    """Return the values of each field without padding, the field of the sequence, and those that are as long as it."""
    check_same_fields("pack()", fields)
    columns = {
        key: [tensor_of(each[key], f"pack(): the field {key!r} of sample {place}") for place, each in enumerate(fields)]
        for key in fields[0]
    }
    masks = columns.pop(MASK_KEY, None)
    main = sequence_key({key: values[0] for key, values in columns.items()})
    lengths = list(map(len, columns[main]))
    packed_keys = [
        key for key, values in columns.items() if all(map(is_sequence, values)) and list(map(len, values)) == lengths
    ]
    if masks is not None:
        used = [_used(mask, length, place) for place, (mask, length) in enumerate(zip(masks, lengths, strict=True))]
        for key in packed_keys:
            columns[key] = [value[part] for value, part in zip(columns[key], used, strict=True)]
    return columns, main, packed_keys


def _used(mask: Tensor, length: int, place: int) -> slice:
    """Return the part of a sample that its mask does not call padding, which is at either end."""
    found = mask.flatten().nonzero().flatten().tolist()
    if mask.shape != (length,) or (found and found[-1] - found[0] >= len(found)):
        what = "leaves out tokens between others" if mask.shape == (length,) else f"has the shape {tuple(mask.shape)}"
        raise make_error(
            ValueError,
            f"pack(): the {MASK_KEY!r} of sample {place}, which has {length} tokens, {what}.",
            fix="Give 1 for each token, with 0 for padding before or after them only.",
        )
    return slice(found[0], found[-1] + 1) if found else slice(0)


def _check_shapes(key: Any, shapes: list[torch.Size], main: Hashable) -> None:
    for place, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise make_error(
                ValueError,
                f"pack(): the field {key!r} has the size {tuple(shapes[0])} in sample 0, and {tuple(shape)} in sample "
                f"{place}.",
                fix=f"Give all the same size, or one that is as long as {main!r} in each sample.",
            )


def _bounds(lengths: list[int], layout: list[list[int]], width: int) -> tuple[list[int], list[int]]:
    """Return where each document begins, and where each sequence ends after a 0; a row's padding is a sequence."""
    starts, ends = [], [0]
    for number, row in enumerate(layout, 1):
        for place in row:
            starts.append(ends[-1])
            ends.append(ends[-1] + lengths[place])
        if ends[-1] < number * width:
            ends.append(number * width)
    return starts, ends


class PackCollator:
    """Joins samples into packed rows, as :func:`pack` does; for ``DataLoader(collate_fn=...)``.

    With :class:`PackedBatchSampler` as the loader's ``batch_sampler`` every row is nearly full and every batch has the
    same shape. Labels of whole samples come in the documents' order, as ``document_starts`` has it.

    Args:
        max_length: tokens of a row; None for one row as long as all samples together.
        rows: rows of a batch; None for as many as are needed.
        next_token: see :func:`pack`.
        padding: see :func:`pack`.
        multiple_of: see :func:`pack`.
        mask: for models that do not use ``cu_seqlens``: ``"causal"`` or ``"full"`` adds ``attention_mask``, bool
            ``(rows, 1, time, time)``, which Hugging Face models take (with ``position_ids``). ``"auto"`` is causal with
            ``next_token``, else full. None adds none: then a model that does not use ``cu_seqlens`` sees across
            boundaries.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is out of range.

    Example::

        >>> import torch
        >>> collate = PackCollator(max_length=4, next_token=False)
        >>> batch = collate([torch.tensor([1, 2]), torch.tensor([3])])
        >>> batch["attention_mask"][0, 0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    """

    def __init__(
        self,
        max_length: int | None = None,
        *,
        rows: int | None = None,
        next_token: bool = True,
        padding: Mapping[Any, Any] | None = None,
        multiple_of: int | None = None,
        mask: Literal["auto", "causal", "full"] | None = "auto",
    ) -> None:
        check.declared(PackCollator.__init__, locals())
        owner = "PackCollator"
        self.max_length = check.whole(owner, "max_length", max_length, at_least=1, unit="tokens", allow_none=True)
        self.rows = check.whole(owner, "rows", rows, at_least=1, unit="rows", allow_none=True)
        self.next_token = next_token
        self.padding = padding
        self.multiple_of = check.whole(owner, "multiple_of", multiple_of, at_least=1, unit="tokens", allow_none=True)
        self.mask = check.one_of(owner, "mask", mask, ("auto", "causal", "full"), allow_none=True)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the packed batch of ``samples``."""
        batch = pack(
            samples,
            self.max_length,
            rows=self.rows,
            next_token=self.next_token,
            padding=self.padding,
            multiple_of=self.multiple_of,
        )
        if self.mask is None:
            return batch
        ids = batch["document_ids"]
        is_auto = self.mask == "auto" and self.next_token
        for key in ("label", "labels"):
            if is_auto and key in batch and batch[key].shape[:2] != ids.shape:
                # A classifier may be of either kind, and the wrong mask would only show in worse results.
                what = f"PackCollator: {key!r} has one value for each document, so the model predicts no next tokens."
                fix = "Use next_token=False, with mask='full' for a bidirectional model or 'causal' for a causal one."
                raise make_error(ValueError, what, fix=fix)
        batch[MASK_KEY] = document_mask(ids, causal=is_auto or self.mask == "causal")
        return batch


def _layout(
    lengths: list[int], max_length: int | None, rows: int | None, multiple_of: int | None
) -> tuple[list[list[int]], int]:
    """Return which samples lie in which row, in their order, and the tokens of a row."""
    if max_length is None:
        width, layout = rounded_up(max(1, sum(lengths)), multiple_of), [list(range(len(lengths)))]
    else:
        width, layout = max_length, []
        left = -1
        for place, length in enumerate(lengths):
            if length > left:
                layout.append([])
                left = max_length
            layout[-1].append(place)
            left -= length
        best = rows_of(lengths, max_length)
        if len(best) < len(layout):
            layout = [sorted(row) for row in best]
    if rows is not None:
        if len(layout) > rows:
            raise make_error(
                ValueError,
                f"pack(rows={rows}): {len(lengths)} samples with {sum(lengths)} tokens need {len(layout)} rows of "
                f"{width}.",
                fix=f"Give fewer samples, more rows, or batch with PackedBatchSampler(rows={rows}).",
                argument="rows",
            )
        layout += [[] for _ in range(rows - len(layout))]
    return layout, width


def _laid_out(
    documents: Sequence[Tensor] | dict[int, Tensor], layout: list[list[int]], width: int, value: Any
) -> Tensor:
    """Return the documents in their rows, ``(rows, width, ...)``, the rest filled with ``value``."""
    first = documents[0]
    whole = first.new_full((len(layout), width, *first.shape[1:]), value)
    for number, row in enumerate(layout):
        if row:
            joined = torch.cat([documents[place] for place in row])
            whole[number, : len(joined)] = joined
    return whole


def _cut_labels(batch: dict[Any, Any], main: Hashable, packed_keys: list[Any]) -> None:
    """Make labels in which no document's first token is predicted from the document before it."""
    if "labels" not in packed_keys and "labels" in batch:
        return  # One mask entry for each document.
    labels = batch.get("labels")
    if labels is None:
        if batch[main].is_floating_point() or batch[main].dim() > 2:
            return
        labels = batch[main].long()
    # Position 0 is the first of a document, and padding.
    batch["labels"] = labels.masked_fill(batch["position_ids"] == 0, IGNORED_LABEL)
