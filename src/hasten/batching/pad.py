"""Join samples of different lengths into a batch, padded to the longest of the batch, not of the dataset."""

from __future__ import annotations

import copy
import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import warn_once

if TYPE_CHECKING:
    from hasten.types import Batch

# Keys under which the sequence of a sample is searched by default.
SEQUENCE_KEYS = ("input_ids", "tokens", "token_ids", "ids", "input_values", "input_features", "inputs_embeds")
MASK_KEY = "attention_mask"
# Fields that a model can make itself, and fields with a known padding value.
REBUILT_KEYS = ("position_ids",)
KNOWN_KEYS = ("input_ids", "token_type_ids", "labels")
# The longest row that can be asked for: its tokens, and a multiple of them, fit in 64 bits.
MOST_TOKENS = 2**40
# Number of distinct lengths in the search for the best widths; with more, lengths are rounded first.
CANDIDATES = 1024
# torch.nn.functional.cross_entropy ignores this label.
IGNORED_LABEL = -100

_T = TypeVar("_T")


def check_same_fields(owner: str, rows: Sequence[Mapping[Any, Any]]) -> None:
    """Check that the samples of a batch have the fields of its first one."""
    for place, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            what = f"{owner}: sample {place} of the batch has {list(row)} and sample 0 has {list(rows[0])}."
            raise make_error(ValueError, what, fix="Give all samples of a dataset the same fields.")


class PadCollator:
    """Joins samples of different lengths into a batch: each sequence is padded to the longest of the batch.

    Samples are dicts, tuples or tensors. Every field whose length differs within the batch is padded along its first
    dimension; the others are joined as ``default_collate`` does. A sample's result does not depend on the length of
    the others, provided that the model uses the mask.

    If all sequences of a batch are equally long and another field is as long, the batch does not show whether that
    field runs over tokens. Such a batch is not widened to ``multiple_of``, unless ``keys`` or the field's name
    (``labels``, ``token_type_ids``) decide it. ``Trainer(batching=...)`` decides it once from the data.

    Args:
        tokenizer: a Hugging Face tokenizer or feature extractor, whose padding values and side are used; labels are
            padded with -100, and ``label`` becomes ``labels``, as its models expect.
        collate_fn: your own, called with the padded samples, which have the same length; by default
            ``default_collate``.
        keys: the fields that are padded; by default those described above.
        padding: the padding value by field; by default -100 for fields that begin with ``label``, else 0, with a
            warning for fields of whole numbers other than the sequence, which may be classes.
        multiple_of: pad to a multiple of so many tokens, or to the next of several widths. Few widths keep
            compiled programs and CUDA graphs usable; multiples of 8 suit tensor cores.
        mask_key: the field of the mask, int64 ``(batch, time)`` with 0 for padding; added to dicts that have none.
            None adds none. Samples that are tuples or tensors get no mask.
        side: where padding goes. A tokenizer has its own.

    Raises:
        TypeError: an argument has a wrong type, or a sample has no sequence.
        ValueError: an argument is out of range, or the tokenizer has no pad token.

    Example::

        >>> import torch
        >>> collate = PadCollator(multiple_of=4)
        >>> batch = collate([{"input_ids": torch.tensor([7, 8, 9]), "labels": 1}, {"input_ids": [5], "labels": 0}])
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist()
        ([[7, 8, 9, 0], [5, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]], [1, 0])

    Source: `Hugging Face, dynamic padding
    <https://huggingface.co/docs/transformers/main_classes/data_collator#transformers.DataCollatorWithPadding>`_.

    """

    def __init__(
        self,
        tokenizer: object = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        keys: Sequence[Any] | None = None,
        padding: Mapping[Any, Any] | None = None,
        multiple_of: int | Sequence[int] | None = None,
        mask_key: str | None = MASK_KEY,
        side: Literal["right", "left"] = "right",
    ) -> None:
        check.callable_("PadCollator", "collate_fn", collate_fn, allowed="a function of samples", allow_none=True)
        if isinstance(keys, str):
            what = f"PadCollator(keys={keys!r}):"
            raise make_error(TypeError, what, fix=f"give a list of fields: keys=[{keys!r}].", argument="keys")
        check.declared(PadCollator.__init__, locals())
        check.one_of("PadCollator", "side", side, ("right", "left"))
        check_multiple_of("PadCollator", multiple_of)
        self.tokenizer: Any = tokenizer
        self.collate_fn = collate_fn
        self.keys = None if keys is None else tuple(keys)
        self.padding = {**_padding_of(tokenizer), **(padding or {})}
        self.multiple_of = multiple_of
        self.mask_key = mask_key
        self.side = getattr(tokenizer, "padding_side", side)
        self._ragged: frozenset[Any] | None = None

    def decided(self, ragged: Collection[Any]) -> PadCollator:
        """Return a copy that pads, besides the sequence and its mask, just the fields whose size varies in the data.

        Without the sequence itself among them, as where all samples are padded already, nothing is decided.
        """
        new = copy.copy(self)
        new._ragged = frozenset(ragged if self.tokenizer is None else map(_hugging_face_name, ragged))
        return new

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """Return the batch of ``samples``."""
        if not samples:
            raise ValueError("PadCollator: there are no samples to join.")
        join = self.collate_fn or default_collate
        if fields_of(samples[0]) is None:
            return join(self._pad_field(None, samples, self.multiple_of))
        rows = [fields_of(sample) or {} for sample in samples]
        check_same_fields("PadCollator", rows)
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        is_mapping = isinstance(samples[0], Mapping)
        if is_mapping and self.tokenizer is not None:
            columns = {_hugging_face_name(key): values for key, values in columns.items()}
        padded = self._padded(columns, adds_mask=is_mapping and self.mask_key is not None)
        rows = [dict(zip(padded, values, strict=True)) for values in zip(*padded.values(), strict=True)]
        return join(rows if is_mapping else list(map(like, samples, rows)))

    def _padded(self, columns: Mapping[Any, Sequence[Any]], *, adds_mask: bool) -> dict[Any, Sequence[Any]]:
        main = sequence_key({key: values[0] for key, values in columns.items()}, self.keys)
        lengths = list(map(len, columns[main]))
        if adds_mask and self.mask_key not in columns:
            masks = [torch.ones(length, dtype=torch.int64) for length in lengths]
            columns = {**columns, self.mask_key: masks}
        is_padded = {key: self._is_padded(key, values, main, lengths) for key, values in columns.items()}
        # If a field may or may not run over tokens, widening could separate it from its tokens, or spoil it.
        multiple_of = None if None in is_padded.values() else self.multiple_of
        ragged = {key: values for key, values in columns.items() if is_padded[key]}
        padded = {key: self._pad_field(key, values, multiple_of) for key, values in ragged.items()}
        for key in ragged.keys() - {main, self.mask_key, *self.padding}:
            _warn_of_classes(key, padded[key], ragged[key])
        return {**columns, **padded}

    def _is_padded(self, key: Any, values: Sequence[Any], main: Any, lengths: list[int]) -> bool | None:
        """Return whether a field is padded; None if neither the batch nor the user decides it."""
        found = list(map(is_sequence, values))
        if not any(found):
            return False
        if not all(found):
            one, other = found.index(True), found.index(False)
            raise make_error(
                ValueError,
                f"PadCollator: {shown(key)} is a sequence (a {type(values[one]).__name__}) in sample {one} of the "
                f"batch and a single {type(values[other]).__name__} in sample {other}.",
                fix="Give all the same kind of value.",
            )
        if key in (main, self.mask_key):
            return True
        if self.keys is not None:
            return key in self.keys
        sizes = list(map(len, values))
        if len(set(sizes)) > 1:
            return True
        if self._ragged is not None and main in self._ragged:
            return key in self._ragged
        if sizes != lengths or rounded_up(sizes[0], self.multiple_of) == sizes[0]:
            return False
        known = key in KNOWN_KEYS and not torch.as_tensor(values[0]).is_floating_point()
        return True if known else None

    def _pad_field(self, key: Any, values: Sequence[Any], multiple_of: int | Sequence[int] | None) -> list[Tensor]:
        name = "" if key is None else f"[{key!r}]"
        tensors = [
            tensor_of(value, f"PadCollator: sample {place} of the batch{name}") for place, value in enumerate(values)
        ]
        width = rounded_up(max(map(len, tensors)), multiple_of)
        padding = self.padding.get(key, default_padding(key))
        tensors = of_one_type(tensors, padding)
        return [pad_to(tensor, width, padding, dim=0, side=self.side) for tensor in tensors]


def pad_collate(samples: Sequence[Any]) -> Batch:
    """Join samples of different lengths to a batch, padded to its longest; ``PadCollator()`` with its defaults.

    Args:
        samples: dicts, tuples or tensors.

    Example::

        >>> import torch
        >>> pad_collate([(torch.tensor([1, 2]), 0), (torch.tensor([3]), 1)])
        [tensor([[1, 2],
                [3, 0]]), tensor([0, 1])]

    """
    return PadCollator()(samples)


# -- fields of samples


def fields_of(sample: object) -> dict[Any, Any] | None:
    """Return a sample's fields by key or position; None if it is a sequence itself."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, tuple) or (isinstance(sample, list) and any(map(is_sequence, sample))):
        return dict(enumerate(sample))
    return None


def tensor_of(value: object, name: str) -> Tensor:
    """Return a field as a tensor; ``name`` describes it in the error."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{name} is a {type(value).__name__} that cannot become a tensor ({error})."
        raise make_error(TypeError, what, fix="Turn text into tokens first, and leave other fields out.") from error


def of_one_type(tensors: Sequence[Tensor], padding: float) -> list[Tensor]:
    """Return the tensors of a field in a type for all of them, which for whole numbers holds the padding too."""
    # An empty list is a tensor of floats.
    kinds = {tensor.dtype for tensor in tensors if tensor.numel()} or {tensors[0].dtype}
    dtype = functools.reduce(torch.promote_types, kinds)
    if not (dtype.is_floating_point or dtype.is_complex) and torch.tensor(padding).to(dtype).item() != padding:
        dtype = torch.int64 if padding == int(padding) else torch.get_default_dtype()
    return [tensor.to(dtype) for tensor in tensors]


def like(sample: _T, fields: Mapping[Any, object]) -> _T:
    """Return a tuple or list of the same type as ``sample``, named or not."""
    kind = cast(Any, type(sample))
    made: _T = kind(*fields.values()) if hasattr(sample, "_fields") else kind(fields.values())
    return made


def is_sequence(value: object) -> bool:
    """Return whether a value has a length in tokens."""
    if hasattr(value, "shape"):
        return len(value.shape) > 0
    return isinstance(value, (list, tuple)) and all(isinstance(each, (int, float, bool)) for each in value)


def sequence_key(sample: object, keys: Sequence[Hashable] | None = None) -> Hashable:
    """Return the place of the sequence in a sample: a key, a position, or None for the sample itself."""
    fields = fields_of(sample)
    if fields is None:
        return None
    given = [key for key in (*SEQUENCE_KEYS, *fields) if is_sequence(fields.get(key))] if keys is None else keys
    for key in given:
        if key in fields:
            return key
    if keys is not None:
        raise KeyError(f"a sample has {list(fields)} and none of {list(keys)}")
    raise TypeError(f"a sample with {list(fields)} has no sequence: all its values are single ones")


def default_padding(key: object) -> int:
    """Return the padding value of a field: -100 for labels, 0 for masks, positions, token types and the rest."""
    return IGNORED_LABEL if isinstance(key, str) and key.startswith("label") else 0


def may_be_classes(key: object, values: Sequence[Any]) -> bool:
    """Return whether a field could be labels of tokens, for which 0 is a class and not padding."""
    if isinstance(key, str):
        # "decoder_input_ids", "special_tokens_mask" and the like.
        known = key in (*KNOWN_KEYS, *REBUILT_KEYS, *SEQUENCE_KEYS) or key.startswith("label")
        if known or "mask" in key or key.endswith(("input_ids", "position_ids", "token_type_ids")):
            return False
    tensors = [torch.as_tensor(value) for value in values]
    return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors if tensor.numel())


def shown(*keys: object) -> str:
    """Return the names of fields for a message."""
    return ", ".join(repr(key) if isinstance(key, str) else f"field {key}" for key in keys)


def pad_to(tensor: Tensor, width: int, value: float, *, dim: int, side: str = "right") -> Tensor:
    """Return ``tensor`` with ``dim`` filled up to ``width`` with ``value``."""
    more = width - tensor.size(dim)
    if more <= 0:
        return tensor
    # functional.pad counts dimensions from the last.
    ends = [0, 0] * (tensor.dim() - dim - 1)
    return functional.pad(tensor, [*ends, *((more, 0) if side == "left" else (0, more))], value=value)


def is_mask(values: Tensor) -> bool:
    """Return whether every row is ones and then, perhaps, zeros."""
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        return False
    numbers = values.to(torch.int8)
    return bool(numbers[:, :1].all()) and bool((numbers[:, 1:] <= numbers[:, :-1]).all())


def extents(used: Tensor) -> Tensor:
    """Return for each row of ``(rows, columns)`` the number of columns up to the last that is not 0."""
    places = torch.arange(1, used.size(1) + 1, device=used.device)
    return torch.where(used != 0, places, 0).amax(1)


def _padding_of(tokenizer: Any) -> dict[str, Any]:
    """Return the padding values of a Hugging Face tokenizer or feature extractor, by field."""
    if tokenizer is None:
        return {}
    if hasattr(tokenizer, "padding_value"):
        return dict.fromkeys(("input_values", "input_features"), tokenizer.padding_value)
    if getattr(tokenizer, "pad_token_id", None) is None:
        shown = repr(tokenizer) if isinstance(tokenizer, (str, int)) else type(tokenizer).__name__
        raise make_error(
            (ValueError if hasattr(tokenizer, "pad_token_id") else TypeError),
            f"PadCollator(tokenizer={shown}): it has no pad token.",
            fix=(
                "Give a Hugging Face tokenizer with one (tokenizer.pad_token = tokenizer.eos_token), or "
                "padding={'input_ids': 0} instead."
            ),
            argument="tokenizer",
        )
    types = getattr(tokenizer, "pad_token_type_id", 0)
    return {"input_ids": tokenizer.pad_token_id, "token_type_ids": types, "special_tokens_mask": 1}


def _warn_of_classes(key: Any, padded: Sequence[Tensor], values: Sequence[Any]) -> None:
    grew = any(len(tensor) > len(value) for tensor, value in zip(padded, values, strict=True))
    if grew and may_be_classes(key, values):
        warn_once(
            f"padded-classes-{key}",
            f"PadCollator: {shown(key)} ({padded[0].dtype}) is padded with 0, which a loss counts if these are "
            "classes.",
            fix=f"Name what pads it: PadCollator(padding={{{key!r}: {IGNORED_LABEL}}}) for labels, 0 for ids.",
        )


def _hugging_face_name(key: Any) -> Any:
    return "labels" if key in ("label", "label_ids") else key


# -- widths: to how many tokens batches are padded; few widths keep compiled programs and CUDA graphs usable


def check_lengths(owner: str, lengths: Sequence[int] | Tensor) -> Tensor:
    """Return the lengths of all samples as an int64 tensor."""
    allowed = "give whole numbers, the tokens of every sample, (samples,), and at least one."
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{owner}(lengths): a {type(lengths).__name__} ({error});"
        raise make_error(TypeError, what, fix=allowed, argument="lengths") from error
    is_whole = not (found.dtype == torch.bool or found.is_floating_point() or found.is_complex())
    if found.numel() and not is_whole:
        raise make_error(TypeError, f"{owner}(lengths): they are {found.dtype};", fix=allowed, argument="lengths")
    if found.dim() != 1 or not found.numel():
        what = f"{owner}(lengths): the shape is {tuple(found.shape)};"
        raise make_error(ValueError, what, fix=allowed, argument="lengths")
    found = found.detach().to("cpu", torch.int64)
    if int(found.min()) < 0:
        place = int(found.argmin())
        what = f"{owner}(lengths): lengths[{place}] is {int(found[place])};"
        raise make_error(ValueError, what, fix="use 0 or more.", argument="lengths")
    return found


def check_multiple_of(owner: str, multiple_of: int | Sequence[int] | None) -> None:
    """Check a ``multiple_of``: None, a number, or the widths to choose from."""
    numbers: list[Any] = list(multiple_of) if isinstance(multiple_of, (list, tuple)) else [multiple_of]
    are_whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if multiple_of is not None and not (
        are_whole and numbers and all(1 <= number <= MOST_TOKENS for number in numbers)
    ):
        allowed = "a number of tokens such as 8 or 64, widths to choose from such as (64, 128, 256), or None"
        error = None if are_whole else TypeError
        raise check.wrong(owner, "multiple_of", multiple_of, allowed, error=error)


def rounded_up(length: int, multiple_of: int | Sequence[int] | None) -> int:
    """Return the number of tokens to which ``length`` is padded.

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
    distinct, places = lengths.unique(return_inverse=True)
    return torch.tensor([rounded_up(length, multiple_of) for length in distinct.tolist()])[places]


def widths_for(lengths: Sequence[int] | Tensor, count: int = 8, *, multiple_of: int = 8) -> tuple[int, ...]:
    """Return the few widths that leave the least padding when each sample is padded to the next of them.

    There are ``count`` of them at most. Each is a multiple of ``multiple_of``; the last is the longest length where its
    multiple would be longer. They rise, and every length fits in the last.

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
