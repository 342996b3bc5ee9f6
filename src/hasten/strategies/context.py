"""Context parallel: each process of a group has a part of every sequence, and attention sees the whole (Ulysses).

``ContextSplit`` is what a strategy uses. ``prepare`` changes the attention of a module, ``split`` cuts a batch, and
``weighed`` scales a loss. ``attention`` and ``find_documents`` are for models that call attention themselves.

Source: `Jacobs et al., DeepSpeed Ulysses <https://arxiv.org/abs/2309.14509>`_.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hasten._lib.errors import MisconfigurationException
from hasten._lib.observers import set_until
from hasten._lib.tree import children, leaves, map_tensors, rebuilt, weighed
from hasten.extend.origin import functions_reached, names_in
from hasten.packed.document_attention import packed_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hasten.types import Batch

OWNER = "context parallel"
# The label that ``cross_entropy`` leaves out.
IGNORED = -100
# The name of the attention in ``config._attn_implementation`` of Hugging Face models.
IMPLEMENTATION = "hasten_ulysses"
# What transformers sets on models with recurrent layers.
_RECURRENT = "_is_stateful"

# The split whose group attention spans now is the last; None while whole sequences are computed.
_active: list[ContextSplit | None] = []


@dataclass(frozen=True, eq=False)
class Documents:
    """Which tokens of whole sequences attend to each other; ``find_documents`` makes it.

    Args:
        bounds: the first token of each document and the end of the last, in the rows laid end to end,
            ``(documents + 1,)`` int32. None if each row is one document.
        mask: what ``scaled_dot_product_attention`` takes as ``attn_mask`` for whole sequences, for masks that are no
            documents; None for no mask.
        keys: the tokens that may be attended to, ``(rows, 1, 1, length)`` bool; None for all.
        blank: the padding before the first token, ``(rows, 1, length, 1)`` bool, whose results are 0; None for none.

    """

    bounds: Tensor | None = None
    mask: Tensor | None = None
    keys: Tensor | None = None
    blank: Tensor | None = None

    @cached_property
    def places(self) -> list[int]:
        """The bounds on the host: a read from the device."""
        return [] if self.bounds is None else self.bounds.tolist()


class ContextSplit:
    """Divides sequences over the processes of a group; each of them computes its part of every sequence.

    The processes of the group read the same batches, and their gradients are averaged, over this group and over those
    that read other batches. Each gradient is then that of the mean over all counted tokens, as with one process.

    Args:
        group: the processes among which sequences are divided.
        sequence_dim: the dimension of the sequence in the tensors of a batch; after ``split`` only.
        names: the keys (of a dict) or places (of a tuple) of the entries of a batch to cut. By default, all tensors
            with at least two dimensions that have the length of the sequence.
        ignore_index: the label of tokens that do not count in the loss.

    Example, with a group of one::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> split, layer = ContextSplit(dist.new_group([0])), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> split.prepare(layer)
        >>> with split.active():
        ...     part = split.split(torch.randn(2, 4, 8))
        ...     split.weighed(layer(part).mean(), part).backward()
        >>> dist.destroy_process_group()

    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        sequence_dim: int = 1,
        names: Sequence[str | int] | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sequence_dim, self.names, self.ignore_index = sequence_dim, names, ignore_index
        # Whether ``labels`` become ``shift_labels``, and whether a batch may be padded: as Hugging Face models need.
        self.shifts = self.pads = False
        self._undo = ExitStack()

    def __deepcopy__(self, memo: object) -> ContextSplit:
        """Return itself: copies of a module attend over the same group."""
        return self

    def prepare(self, module: nn.Module) -> None:
        """Let the attention of a module span the group, while ``active``; ``release`` undoes it.

        Changed are Hugging Face models, ``nn.MultiheadAttention`` and the layers of torch that have one. Code of the
        program calls ``attention``.

        The module is not wrapped or compiled yet.
        """
        models = _transformers_in(module)
        theirs = {part for model in models for part in model.modules()}
        layers = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
        for name, part in module.named_modules():
            _check_layer(name, part)
        for model in models:
            _check_transformer(model)
        own = [part for part in module.modules() if part not in theirs]
        if not _check_own_code(own) and not models and not layers:
            raise MisconfigurationException(
                f"{OWNER}: no attention that spans the processes was found in {type(module).__name__}.",
                fix="Call hasten.strategies.context.attention where the model attends.",
            )
        with ExitStack() as undo:
            _prepare_transformers(models, self, undo)
            self._undo.enter_context(undo.pop_all())
        for part in module.modules():
            if isinstance(part, nn.MultiheadAttention):
                set_until(self._undo, vars(part), "forward", partial(_multihead, part, self))
            # The fused layer of evaluation does not call its attention.
            elif isinstance(part, nn.TransformerEncoderLayer):
                set_until(self._undo, vars(part), "activation_relu_or_gelu", 0)
            elif isinstance(part, nn.TransformerEncoder):
                set_until(self._undo, vars(part), "use_nested_tensor", False)
        self.pads, self.shifts = bool(models), any(map(_predicts_next, models))

    def release(self) -> None:
        """Undo what ``prepare`` has changed."""
        self._undo.close()

    def active(self) -> AbstractContextManager[None]:
        """Let attention span the group: around forward and backward, or around a whole run."""
        return _attending_over(self)

    def split(self, batch: Batch) -> Batch:
        """Return the part of a batch that belongs to this process; see ``split_batch``. All have the same batch."""
        return split_batch(
            batch,
            self.rank,
            self.size,
            sequence_dim=self.sequence_dim,
            names=self.names,
            shift=self.shifts,
            pad=self.pads,
            ignore_index=self.ignore_index,
        )

    def weight(self, batch: Batch) -> Tensor | float:
        """Return the factor of a loss with which its average over the group is the mean over all counted tokens.

        Counted are the ``shift_labels`` of this process's part, or else its ``labels``, which are not ``ignore_index``.
        The counts are summed over the group, which is a collective: ``counted here * size / counted in the group``. 1.0
        for a batch without such labels, whose parts are equal.
        """
        labels = _labels_of(batch)
        if labels is None:
            return 1.0
        counted = (labels != self.ignore_index).sum()
        total = counted.clone()
        dist.all_reduce(total, group=self.group)
        return (counted * self.size).double() / total.clamp(min=1)

    def weighed(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return a loss times ``weight``; 0 where no token of this process counts, although its mean is not a number.

        The loss is the mean over the counted tokens of ``batch``, this process's part.
        """
        return _weighed(loss, self.weight(batch))

    def step(
        self, function: Callable[..., Any], *, trains: bool, weighing: Callable[[Tensor], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Return a step of a module, such as ``training_step``, that computes this process's part of its batch.

        With ``trains`` the loss is weighed that it returns, by itself or as "loss" of a dict; one with "loss_weight" by
        that. ``weighing`` returns a context in which the means that the step logs count by a weight.
        """

        @wraps(function)
        def on_part(batch: Batch, *args: Any, **kwargs: Any) -> Any:
            part = self.split(batch)
            if part is batch:
                what = f"{OWNER}: there is no tensor of at least two dimensions in the batch ({type(batch).__name__})."
                fix = "Return batches whose tensors are (batch, sequence, ...)."
                raise MisconfigurationException(what, fix=fix, argument="batch")
            weight = self.weight(part)
            with nullcontext() if isinstance(weight, float) else weighing(weight):
                output = function(part, *args, **kwargs)
            if not trains or output is None:
                return output
            if not isinstance(output, Mapping):
                return _weighed(output, weight)
            if output.get("loss") is None or "loss_weight" in output:
                return output
            return {**output, "loss": _weighed(output["loss"], weight)}

        return on_part

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the parts of all processes, of one shape, joined along a dimension; gradients go back to them."""
        dim = dim % tensor.dim()
        sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        parts = all_to_all(sent.expand(self.size, *sent.shape).contiguous(), self.group)
        return parts.movedim(0, dim).flatten(dim, dim + 1).to(tensor.dtype)


def _weighed(loss: Tensor, weight: Tensor | float) -> Tensor:
    return loss if isinstance(weight, float) else weighed(loss, weight)


@contextmanager
def _attending_over(split: ContextSplit | None) -> Iterator[None]:
    _active.append(split)
    try:
        yield
    finally:
        _active.pop()


def whole_sequences() -> AbstractContextManager[None]:
    """Compute whole sequences in each process: for text that a callback generates during a run.

    Example::

        >>> with whole_sequences():
        ...     first_position(10)
        0

    """
    return _attending_over(None)


def first_position(length: int) -> int:
    """Return the place of this process's first token in the whole sequence; 0 without context parallel.

    For models that make positions themselves: ``first_position(n) + torch.arange(n)``.

    A sequence has ``length`` tokens on this process.

    Example::

        >>> first_position(10)
        0

    """
    split = _current()
    return 0 if split is None else split.rank * length


def _current() -> ContextSplit | None:
    return _active[-1] if _active else None


# -- the batch


def split_batch(
    batch: Batch,
    rank: int,
    size: int,
    *,
    sequence_dim: int = 1,
    names: Sequence[str | int] | None = None,
    shift: bool = False,
    pad: bool = False,
    ignore_index: int = IGNORED,
) -> Batch:
    """Return the part of a batch that belongs to one of several processes, cut along the sequence.

    Args:
        batch: a tensor, or dicts, lists, tuples and dataclasses that hold tensors. The length of its sequences is
            that of ``input_ids`` or ``inputs_embeds``, or else that of its first tensor with two dimensions. A dict
            with one of these two also gets ``position_ids``, unless it has them.
        rank: the place of the process in its group, from 0.
        size: how many processes share a sequence.
        sequence_dim: the dimension of the sequence.
        names: the keys (of a dict) or places (of a tuple) of the entries to cut; the others stay whole. By default,
            each tensor with at least two dimensions that has the length of the sequence is cut.
        shift: whether ``labels`` are those of models which predict the next token and shift them: then the part also
            gets ``shift_labels``, shifted before the cut, so that the last token of a part keeps its label.
        pad: whether to pad sequences of another length than a multiple of ``size``, with labels that do not count and
            tokens that no other attends to; for dicts with ``input_ids`` or ``inputs_embeds``.
        ignore_index: the label that does not count.

    Returns:
        a batch of the same kind, with ``1 / size`` of each sequence.

    Raises:
        MisconfigurationException: the length does not divide and ``pad`` is false, or ``names`` are not in the batch.

    Example::

        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
        >>> part = split_batch(batch, rank=0, size=2, shift=True)
        >>> part["input_ids"], part["shift_labels"]
        (tensor([[5, 6]]), tensor([[6, 7]]))
        >>> split_batch(batch, rank=1, size=2)["position_ids"]
        tensor([[2, 3]])

    """
    names = None if names is None else _checked_names(batch, names)
    tokens = _tokens_of(batch) if sequence_dim == 1 else None
    if tokens is not None:
        batch = _completed(batch, tokens, shift, ignore_index)
        names = names and [*names, "position_ids", "shift_labels"]
    length = _length_of(batch, tokens, names, sequence_dim)
    if length is None:
        return batch
    missing = -length % size
    if missing and (tokens is None or not pad):
        what = f"{OWNER}: sequences of {length} tokens do not divide over {size} processes."
        fix = f"Pad or cut them to a multiple of {size} in the dataset or in collate_fn."
        raise MisconfigurationException(what, fix=fix, argument="batch")
    if missing:
        padded = [_padded(key, value, length, missing, ignore_index) for key, value in batch.items()]
        batch = rebuilt(batch, padded)
    cut = partial(_cut, dim=sequence_dim, length=length + missing, rank=rank, size=size)
    if names is None:
        return map_tensors(cut, batch)
    return rebuilt(batch, [map_tensors(cut, value) if key in names else value for key, value in _items(batch)])


def _cut(tensor: Tensor, dim: int, length: int, rank: int, size: int) -> Tensor:
    """Return a part of a tensor that has sequences of this length, and another tensor as it is."""
    if not _has_sequences(tensor, dim, length):
        return tensor
    return tensor.narrow(dim, rank * (length // size), length // size).contiguous()


def _has_sequences(tensor: Tensor, dim: int, length: int) -> bool:
    return tensor.dim() > max(dim, 1) and tensor.size(dim) == length


def _completed(batch: Any, tokens: Tensor, shift: bool, ignore_index: int) -> Any:
    """Return the batch of a Hugging Face model with positions, and with shifted labels if the model shifts them."""
    labels = _labels_of(batch)
    if shift and labels is not None and "shift_labels" not in batch:
        batch = _with(batch, "shift_labels", functional.pad(labels[:, 1:], (0, 1), value=ignore_index))
    if "position_ids" in batch:
        return batch
    place = torch.arange(tokens.size(1), device=tokens.device)
    return _with(batch, "position_ids", place.expand(tokens.size(0), -1))


def _tokens_of(batch: Any) -> Tensor | None:
    """Return what the batch of a Hugging Face model has as tokens, of at least two dimensions; None for another."""
    if not isinstance(batch, Mapping):
        return None
    found = [batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)]
    return found[0] if found and found[0].dim() > 1 else None


def _labels_of(batch: Any) -> Tensor | None:
    for name in ("shift_labels", "labels"):
        labels = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() > 1:
            return labels
    return None


def _with(batch: Any, name: str, value: Tensor) -> Any:
    """Return a copy of a mapping with one more entry."""
    new = rebuilt(batch, list(batch.values()))
    new[name] = value
    return new


def _length_of(batch: Any, tokens: Tensor | None, names: list[Any] | None, dim: int) -> int | None:
    """Return the length of the sequences of a batch; None if it has none."""
    if tokens is not None:
        return tokens.size(dim)
    held = batch if names is None else [value for key, value in _items(batch) if key in names]
    found = [each for each in leaves(held) if isinstance(each, Tensor) and each.dim() > max(dim, 1)]
    return found[0].size(dim) if found else None


def _items(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(value for _, value in children(batch)))


def _checked_names(batch: Any, names: Sequence[Any]) -> list[Any]:
    keys = [key for key, _ in _items(batch)]
    for name in names:
        if name not in keys:
            what = f"{OWNER}: the batch has no {name!r}."
            raise MisconfigurationException(what, fix=f"Choose among {', '.join(map(repr, keys))}.", argument="names")
    return list(names)


def _padded(key: Any, value: Any, length: int, missing: int, ignore_index: int) -> Any:
    """Return an entry of a Hugging Face batch with ``missing`` more tokens at the end of its sequences."""
    if not isinstance(value, Tensor) or not _has_sequences(value, 1, length):
        return value
    if key == "position_ids":
        # They begin anew, so no token of the sequence attends to them.
        return torch.cat([value, torch.arange(missing, device=value.device).expand(value.size(0), -1)], 1)
    filler = value.new_full((value.size(0), missing, *value.shape[2:]), ignore_index if "labels" in str(key) else 0)
    return torch.cat([value, filler], 1)


# -- attention


def find_documents(position_ids: Tensor, attention_mask: Tensor | None = None) -> Documents:
    """Return which tokens of packed or padded rows attend to each other, for ``attention``; once for all layers.

    Gathers both over the processes that share a sequence, and reads from the device once.

    Args:
        position_ids: the place of each token of this process in its document, ``(rows, tokens)``; a document begins
            where they do not continue.
        attention_mask: 1 for tokens and 0 for padding, ``(rows, tokens)``. With it, each row is one document, whatever
            its positions are, as in Hugging Face models.

    Example::

        >>> find_documents(torch.tensor([[0, 1, 2, 0, 1]])).places
        [0, 3, 5]
        >>> find_documents(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 0]])).places
        [0, 2, 3]

    """
    split = _current()
    told = position_ids if attention_mask is None else attention_mask != 0
    told = told if split is None else split.gather(told, 1)
    if attention_mask is None:
        changes = told[:, 1:] != told[:, :-1] + 1
        none = told.new_zeros((), dtype=torch.bool)
        facts = [changes.any(), none, none]
    else:
        changes = told[:, 1:] != told[:, :-1]
        # Padding between tokens: more than one begin of a run of tokens.
        facts = [changes.any(), ((changes & told[:, 1:]).sum(1) + told[:, 0] > 1).any(), ~told[:, 0].all()]
    changed, has_holes, is_blank = torch.stack(facts).tolist()
    if has_holes:
        return Documents(keys=told[:, None, None, :])
    if not changed:
        return Documents()
    begins = functional.pad(changes, (1, 0), value=True).flatten().nonzero().flatten()
    return Documents(
        bounds=functional.pad(begins, (0, 1), value=told.numel()).to(torch.int32),
        blank=(told.cumsum(1) == 0)[:, None, :, None] if is_blank else None,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    documents: Documents | None = None,
    window: int | None = None,
) -> Tensor:
    """Same as ``torch.nn.functional.scaled_dot_product_attention``, over the sequences that processes share.

    Each process passes its part of the sequences with all heads. It gets all tokens of some heads, attends, and gets
    its own tokens back, with all heads. If the number of processes does not divide ``heads``, some processes get fewer
    heads than others, and compute zeros for the rest. Without context parallel, nothing is sent.

    Args:
        query: ``(rows, heads, tokens, head_dim)``, this process's tokens.
        key: ``(rows, key_heads, tokens, head_dim)``.
        value: ``(rows, key_heads, tokens, head_dim)``.
        attn_mask: bool (True attends) or added to the scores, ``(..., queries, keys)``: all keys of the sequence, and
            the queries of this process or of the sequence.
        dropout_p: share of attention weights to drop, 0 to 1.
        is_causal: whether a token attends only to itself and earlier tokens.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        enable_gqa: whether ``key_heads`` may be a part of ``heads``.
        documents: attend within the documents of packed or padded rows, from ``find_documents``.
        window: attend to the last ``window`` tokens alone; with ``is_causal``.

    Returns:
        ``(rows, heads, tokens, head_dim)``, this process's tokens.

    Raises:
        MisconfigurationException: a mask does not fit, or arguments exclude each other.

    Example::

        >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
        >>> documents = find_documents(torch.tensor([[0, 1, 2, 0, 1]]))
        >>> together = attention(q, k, v, is_causal=True, documents=documents)
        >>> alone = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True)
        >>> torch.allclose(together[:, :, 3:], alone)
        True

    """
    split = _current()
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if split is None and documents is None and window is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
    if attn_mask is not None and (documents is not None or window is not None):
        raise MisconfigurationException(
            f"{OWNER}: attention takes attn_mask, or documents and window.", fix="Leave attn_mask out."
        )
    if window is not None and not is_causal:
        raise MisconfigurationException(
            f"{OWNER}: attention(window={window}) only looks back.", fix="Use is_causal=True.", argument="window"
        )
    documents = documents or Documents(mask=attn_mask)
    if split is None:
        return _attend(query, key, value, documents, window, options)
    heads = query.size(1)
    if documents.mask is not None:
        tokens, all_keys = query.size(2), key.size(2) * split.size
        documents = Documents(mask=_of_own_heads(split, _whole_mask(split, documents.mask, tokens, all_keys), heads))
    query, key, value = _to_heads(split, query, key, value)
    return _to_tokens(split, _attend(query, key, value, documents, window, options), heads)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, options: dict[str, Any]
) -> Tensor:
    """Attend within whole sequences, ``(rows, heads, length, head_dim)``."""
    attended = _in_documents(query, key, value, documents, window, options)
    # As torch's attention for a query that has no key.
    return attended if documents.blank is None else attended.masked_fill(documents.blank, 0.0)


def _in_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, options: dict[str, Any]
) -> Tensor:
    rows, heads, length, _ = query.shape
    grouped = key.size(1) != heads
    if window is not None and window < length:
        return _in_window(query, key, value, documents, window, options)
    if documents.bounds is not None:
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        attended = packed_attention(
            q,
            k,
            v,
            documents.bounds,
            length,
            causal=options["is_causal"],
            dropout_p=options["dropout_p"],
            scale=options["scale"],
        )
        in_rows: Tensor = attended.unflatten(0, (rows, length)).transpose(1, 2)
        return in_rows
    mask = documents.mask
    if documents.keys is not None:
        mask = documents.keys.expand(-1, -1, length, -1)
        mask = mask.tril() if options["is_causal"] else mask
        options = options | {"is_causal": False}
    return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped, **options)


def _in_window(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int, options: dict[str, Any]
) -> Tensor:
    """Attend to the last ``window`` tokens, a window of queries at a time: no mask has the length of the sequence."""
    rows, heads, length, _ = query.shape
    places, keys = documents.places, documents.keys
    if places:
        query, key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
    parts, options = [], options | {"is_causal": False, "enable_gqa": key.size(1) != heads}
    bounds = places or [0, length]
    for begin, end in pairwise(bounds):
        for first in range(begin, end, window):
            stop, lowest = min(first + window, end), max(begin, first - window + 1)
            own = torch.arange(first, stop, device=query.device)
            age = own[:, None] - torch.arange(lowest, stop, device=query.device)
            seen = (age >= 0) & (age < window)
            if keys is not None:
                seen = seen & keys[..., lowest:stop]
            k, v = key[:, :, lowest:stop], value[:, :, lowest:stop]
            parts.append(functional.scaled_dot_product_attention(query[:, :, first:stop], k, v, seen, **options))
    attended = torch.cat(parts, 2)
    return attended[0].unflatten(1, (rows, length)).transpose(0, 1) if places else attended


class _AllToAll(torch.autograd.Function):
    """Sends the i-th part of a tensor to the i-th process of a group, and gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, sent: _Rows, received: _Rows) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        found = torch.empty_like(tensor) if received is None else tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(found, tensor, received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_to_all(gradients[0].contiguous(), ctx.group, ctx.received, ctx.sent), None, None, None


# How many rows of a tensor go to each process of a group, or come from it; None for the same number.
_Rows = list[int] | None


def all_to_all(tensor: Tensor, group: ProcessGroup, sent: _Rows = None, received: _Rows = None) -> Tensor:
    """Return what the processes of a group sent here; gradients go the other way.

    The tensor, contiguous, has one part of its rows for each process, in order. ``sent`` says how many rows go to each,
    the same number by default, ``received`` how many come.
    """
    found: Tensor = _AllToAll.apply(tensor, group, sent, received)
    return found


def _to_heads(split: ContextSplit, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Exchange this process's tokens of all heads for all tokens of its heads; one collective for equal lengths."""
    size, heads = split.size, query.size(1)
    if missing := -heads % size:
        # Heads of zeros, whose results are left out: each process gets the same number.
        key, value = (each.repeat_interleave(heads // each.size(1), 1) for each in (key, value))
        query, key, value = (_with_heads(each, missing) for each in (query, key, value))
    # Fewer heads of keys than processes: several processes get the same.
    times = math.lcm(key.size(1), size) // key.size(1)
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if key.size(2) == query.size(2):
        return _by_head(split, query, key, value)
    return _by_head(split, query) + _by_head(split, key, value)


def _by_head(split: ContextSplit, *tensors: Tensor) -> list[Tensor]:
    # (rows, heads, tokens, width) of each becomes (size, rows, tokens, heads of one process * width).
    sent = [each.unflatten(1, (split.size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for each in tensors]
    received = all_to_all(torch.cat(sent, -1), split.group)
    whole = received.transpose(0, 1).flatten(1, 2).split([each.size(-1) for each in sent], -1)
    return [part.unflatten(-1, (-1, each.size(-1))).transpose(1, 2) for part, each in zip(whole, tensors, strict=True)]


def _to_tokens(split: ContextSplit, attended: Tensor, heads: int) -> Tensor:
    """Exchange all tokens of this process's heads for its tokens of all ``heads``."""
    sent = attended.unflatten(2, (split.size, -1)).permute(2, 0, 3, 1, 4).contiguous()
    # (size, rows, tokens, heads of one process, head_dim).
    received = all_to_all(sent, split.group)
    whole = received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)
    return whole if whole.size(1) == heads else whole[:, :heads]


def _whole_mask(split: ContextSplit, mask: Tensor, tokens: int, keys: int) -> Tensor:
    """Return a mask with the queries of all processes, or with one for all."""
    rows = mask.size(-2) if mask.dim() > 1 else 1
    if mask.size(-1) not in (1, keys) or rows not in (1, tokens, tokens * split.size):
        raise MisconfigurationException(
            f"{OWNER}: a mask of shape {tuple(mask.shape)} for {tokens} queries of this process and {keys} keys of the "
            "whole sequence.",
            fix=f"Make it for all {keys} keys, or use is_causal=True.",
            argument="attn_mask",
        )
    return split.gather(mask, -2) if rows == tokens and rows > 1 else mask


def _of_own_heads(split: ContextSplit, mask: Tensor, heads: int) -> Tensor:
    """Return the part of a mask that belongs to the heads of this process."""
    if mask.dim() < 3 or mask.size(-3) != heads or heads == 1:
        return mask
    if missing := -heads % split.size:
        mask = _with_heads(mask, missing)
    here = mask.size(-3) // split.size
    return mask.narrow(-3, split.rank * here, here)


def _with_heads(tensor: Tensor, missing: int) -> Tensor:
    """Return a tensor ``(..., heads, tokens, width)`` with more heads: of zeros, or of True in a mask."""
    return functional.pad(tensor, (0, 0, 0, 0, 0, missing), value=float(tensor.dtype == torch.bool))


# -- modules of torch, and the code of the program


def _check_layer(name: str, part: nn.Module) -> None:
    """Refuse a layer of torch that computes tokens from others, unless it is an attention that can be replaced."""
    what = f"{name} ({type(part).__name__})"
    if isinstance(part, nn.RNNBase) or (isinstance(part, nn.Conv1d) and part.kernel_size != (1,)):
        raise MisconfigurationException(
            f"{OWNER}: {what} computes tokens from their neighbours, which other processes have.",
            fix="Use attention alone to combine tokens, or leave context parallel out.",
        )
    if not isinstance(part, nn.MultiheadAttention):
        return
    if type(part).forward is not nn.MultiheadAttention.forward or part.bias_k is not None or part.add_zero_attn:
        raise MisconfigurationException(
            f"{OWNER}: {what} has a forward of its own, add_bias_kv or add_zero_attn.",
            fix="Call hasten.strategies.context.attention in a module of your own instead.",
        )


def _check_own_code(parts: list[nn.Module]) -> bool:
    """Refuse modules whose code calls torch's attention; return whether some code calls ``attention``."""
    found = False
    for kind in {type(part) for part in parts}:
        steps = [getattr(kind, name, None) for name in ("forward", "training_step")]
        for function in functions_reached(steps, partial(_member, kind)):
            names = names_in(function)
            calls = any(function.__globals__.get(name) is attention for name in names)
            found = found or {"attention", "context"} <= names or calls
            called = names & {"scaled_dot_product_attention", "flex_attention"}
            if called:
                raise MisconfigurationException(
                    f"{OWNER}: {kind.__name__} calls {min(called)}, which attends within a process's part of a "
                    "sequence.",
                    fix="Call hasten.strategies.context.attention instead: it takes the same arguments.",
                )
    return found


def _member(kind: type, name: str) -> Any:
    return getattr(kind, name, None)


def _multihead(
    module: nn.MultiheadAttention,
    split: ContextSplit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what ``nn.MultiheadAttention`` does, for parts of sequences; the weights of the attention are not returned."""
    if _current() is not split:
        return nn.MultiheadAttention.forward(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    if query.dim() != 3:
        raise MisconfigurationException(
            f"{OWNER}: nn.MultiheadAttention got a query of {query.dim()} dimensions.",
            fix="Pass (rows, tokens, width) with batch_first=True.",
        )
    own = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = own if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases: Sequence[Tensor | None] = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    given = [each if module.batch_first else each.transpose(0, 1) for each in (query, key, value)]
    q, k, v = (
        functional.linear(each, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for each, weight, bias in zip(given, weights, biases, strict=True)
    )
    mask = _joint_mask(split, q, k, key_padding_mask, None if is_causal else attn_mask, is_causal)
    dropout = module.dropout if module.training else 0.0
    attended = attention(q, k, v, mask, dropout, is_causal=is_causal and mask is None)
    output = module.out_proj(attended.transpose(1, 2).flatten(2))
    return (output if module.batch_first else output.transpose(0, 1)), None


def _joint_mask(
    split: ContextSplit, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None, causal: bool
) -> Tensor | None:
    """Return the masks of ``nn.MultiheadAttention``, where True does not attend, as one to add to the scores."""
    rows, heads, tokens, _ = query.shape
    hidden = [] if padding is None else [split.gather(padding, 1)[:, None, None, :]]
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask.unflatten(0, (rows, heads))
        hidden.append(_whole_mask(split, mask, tokens, key.size(2) * split.size))
    if not hidden:
        return None
    if causal:
        length = tokens * split.size
        hidden.append(torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1))
    added = _added(hidden[0], query.dtype)
    for each in hidden[1:]:
        added = added + _added(each, query.dtype)
    return added


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of ``nn.MultiheadAttention`` as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


# -- models of transformers


def _transformers_in(module: nn.Module) -> list[Any]:
    """Return the Hugging Face models in a module, outer ones first, without importing transformers."""
    home = sys.modules.get("transformers.modeling_utils")
    return [] if home is None else [part for part in module.modules() if isinstance(part, home.PreTrainedModel)]


def _predicts_next(model: Any) -> bool:
    return _loss_of(model) == "ForCausalLM"


def _loss_of(model: Any) -> str:
    """Return the loss that a model computes from labels as transformers names it; "" for none."""
    forward = type(model).forward
    if "labels" not in _takes(forward):
        return ""
    loss = getattr(model, "loss_type", None) or "ForCausalLM"
    shared = "loss_function" in names_in(inspect.unwrap(forward))
    return "a loss of its own" if loss == "ForCausalLM" and not shared else str(loss)


def _takes(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def _makes_positions(model: Any) -> bool:
    """Return whether a model computes the places of its tokens from the tokens or the mask."""
    return any(
        hasattr(part, "create_position_ids_from_input_ids")
        or (isinstance(part, nn.Embedding) and "attention_mask" in _takes(type(part).forward))
        for part in model.modules()
    )


def _check_transformer(model: Any) -> None:
    """Refuse a model whose tokens meet elsewhere than in an attention that can be replaced."""
    config, text = model.config, model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    loss = _loss_of(model)
    for holds, why in (
        (getattr(config, "is_encoder_decoder", False), "it has an encoder and a decoder"),
        (getattr(model, _RECURRENT, False), "it has recurrent layers"),
        (kinds, f"it has layers of the kind {min(kinds, default='')}"),
        (getattr(text, "attention_chunk_size", None), "its attention is in chunks"),
        (getattr(text, "attn_logit_softcapping", None), "its attention has a softcap"),
        (not (model._supports_sdpa and model._supports_attention_backend), "it has an attention of its own"),
        (_makes_positions(model), "it computes positions from its tokens"),
        (loss not in ("", "ForCausalLM", "ForMaskedLM", "ForTokenClassification"), f"its loss is {loss}"),
    ):
        if holds:
            what = f"{OWNER}: {type(model).__name__} cannot be divided along its sequences, because {why}."
            raise MisconfigurationException(what, fix="Leave context parallel out.", argument="context")


def _prepare_transformers(models: list[Any], split: ContextSplit, undo: ExitStack) -> None:
    """Let Hugging Face models attend over the group, until ``undo`` is closed."""
    if not models:
        return
    _register()
    inner = {part for model in models for part in model.modules() if part is not model}
    outermost = [model for model in models if model not in inner]
    for model in outermost:
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(IMPLEMENTATION)
    for model in models:
        names = _takes(type(model).forward)
        has_model = any(other is not model and other in set(model.modules()) for other in models)
        if model.config._attn_implementation != IMPLEMENTATION or not (
            has_model or {"attention_mask", "position_ids"} <= set(names)
        ):
            what = f"{OWNER}: {type(model).__name__} does not take another attention, or no position_ids."
            raise MisconfigurationException(what, fix="Leave context parallel out.", argument="context")
        hook = _check_labels if has_model else _give_documents
        undo.callback(model.register_forward_pre_hook(partial(hook, split, names), with_kwargs=True).remove)


def _register() -> None:
    """Add the attention to those that Hugging Face models know, with the masks of ``sdpa`` for whole sequences."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _ulysses)
    AttentionMaskInterface.register(IMPLEMENTATION, AttentionMaskInterface()["sdpa"])


def _check_labels(split: ContextSplit, names: list[str], model: Any, args: Any, kwargs: Any) -> None:
    """Refuse labels that the model would shift within a part."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if _current() is not split or given.get("labels") is None or given.get("shift_labels") is not None:
        return
    if _predicts_next(model):
        raise MisconfigurationException(
            f"{OWNER}: {type(model).__name__} got labels without shift_labels, so the last token of each part would "
            "lose its label.",
            fix="Pass shift_labels=batch['shift_labels'] too.",
            argument="labels",
        )


def _give_documents(split: ContextSplit, names: list[str], model: Any, args: Any, kwargs: Any) -> Any:
    """Give the layers of a model the documents of whole sequences, before the model makes a mask for a part."""
    if _current() is not split:
        return None
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if kwargs.get("past_key_values") is not None:
        raise MisconfigurationException(
            f"{OWNER}: {type(model).__name__} got past_key_values: it generates whole sequences.",
            fix="Write `with hasten.strategies.context.whole_sequences():` around it.",
        )
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    rows, here = tokens.shape[:2]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None:
        positions = (first_position(here) + torch.arange(here, device=tokens.device)).expand(rows, -1)
    if positions.dim() != 2 or (mask is not None and mask.dim() != 4 and mask.shape != tokens.shape[:2]):
        raise MisconfigurationException(
            f"{OWNER}: {type(model).__name__} got {here} tokens of each sequence, with position_ids of shape "
            f"{tuple(positions.shape)} and attention_mask of shape {mask if mask is None else tuple(mask.shape)}.",
            fix="Pass all three as they are in the batch.",
        )
    if mask is not None and mask.dim() == 4:
        documents = Documents(mask=mask)
    else:
        documents = find_documents(positions.expand(rows, -1), mask)
    # The model passes a mask of four dimensions on, and makes none. The layers use the documents.
    passed = torch.ones(rows, 1, 1, here * split.size, dtype=torch.bool, device=tokens.device)
    kwargs.update(position_ids=positions, attention_mask=passed, hasten_documents=documents)
    if "use_cache" in names:
        kwargs["use_cache"] = False
    return (), kwargs


def _ulysses(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    hasten_documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` of transformers, over the group where it is active."""
    if _current() is None:
        from transformers import AttentionInterface

        attend = AttentionInterface()["sdpa"]
        whole: tuple[Tensor, None] = attend(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
        return whole
    unknown = [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]
    if hasten_documents is None or unknown:
        raise MisconfigurationException(
            f"{OWNER}: {type(module).__name__} "
            + (f"adds {unknown[0]} to its scores." if unknown else "does not get the arguments that its model got."),
            fix="Leave context parallel out.",
            argument="context",
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    attended = attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=causal and hasten_documents.mask is None,
        scale=scaling,
        documents=hasten_documents,
        window=None if hasten_documents.mask is not None else sliding_window,
    )
    return attended.transpose(1, 2).contiguous(), None
