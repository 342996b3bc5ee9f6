"""Plan a model of many equal blocks from two plans with a few of them: their difference is what a block adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hasten.memory import repeated_blocks
from hasten_tools.plan.ledger import BACKWARD, TEMPORARY

if TYPE_CHECKING:
    from hasten_tools.plan.ledger import Ledger
    from hasten_tools.plan.report import Measured

# How many blocks the two plans keep: the first ones and the last ones, half of each.
FEW, MORE = 4, 6
# Plans with a few blocks find the parts of a peak again when it has grown by this share: differences are multiplied.
_GROWTH = 1.0005


def leave_out(module: nn.Module, kept: int, ledger: Ledger, stages: Mapping[str, int], stage: int) -> int:
    """Leave out all but some of the equal blocks of a module, in place, and count the backward of each block kept.

    The module is not divided yet, and names of its parts do not change. Of each row of equal blocks ``kept`` stay, an
    even number. ``stages`` has the stage of a pipeline that has each block, by name, and ``stage`` is one of this
    process; empty and 0 without a pipeline. Return the number of blocks in a row of the stage; 0 if nothing was left
    out: there are few blocks, or rows of different lengths.
    """
    rows = _rows_of_equal_blocks(module, stages)
    lengths = {len(names) for _, names, of in rows if of == stage}
    if len(lengths) != 1 or min(len(names) for _, names, _ in rows) < 2 * FEW:
        return 0
    ledger.growth = _GROWTH
    for parent, names, of in rows:
        form, length = _BlockForm(), len(names)
        for place, name in enumerate(names):
            if kept // 2 <= place < length - kept // 2:
                setattr(parent, name, _LeftOut(form))
            elif of == stage:
                _watch(getattr(parent, name), place if place < kept // 2 else place - length, form, ledger)
    return lengths.pop()


def _rows_of_equal_blocks(module: nn.Module, stages: Mapping[str, int]) -> list[tuple[nn.Module, list[str], int]]:
    """Return the modules that have several blocks of one class with equal parameters, their names and their stage."""
    blocks = set(map(id, repeated_blocks(module)))
    found = []
    for prefix, parent in module.named_modules():
        by_kind: dict[Any, list[str]] = {}
        for name, child in parent.named_children():
            if id(child) in blocks:
                stage = stages.get(f"{prefix}.{name}".lstrip("."), 0)
                shapes = tuple((key, p.shape, p.dtype, p.requires_grad) for key, p in child.named_parameters())
                by_kind.setdefault((stage, type(child), shapes), []).append(name)
        found += [(parent, names, key[0]) for key, names in by_kind.items()]
    return found


class _BlockForm:
    """What the blocks of a row return: a tensor of the shape of their first argument, or a tuple with one."""

    in_tuple = False

    def note(self, given: object, output: Any) -> Tensor:
        """Return the tensor in what a block returned for its first argument."""
        self.in_tuple = isinstance(output, tuple) and len(output) == 1
        tensor = output[0] if self.in_tuple else output
        if not isinstance(tensor, Tensor) or not isinstance(given, Tensor) or tensor.shape != given.shape:
            raise ValueError("a block does not return a tensor of the shape of its first argument.")
        return tensor


class _LeftOut(nn.Module):
    """Stands for a block that was left out, and hands on what it is given."""

    def __init__(self, form: _BlockForm) -> None:
        super().__init__()
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = _first(args, kwargs)
        return (given,) if self._form.in_tuple else given


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _watch(block: nn.Module, place: int, form: _BlockForm, ledger: Ledger) -> None:
    """Note what a block returns, and where its backward begins."""

    def noted(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = form.note(_first(args, kwargs), output)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: ledger.begin(f"{BACKWARD} {place}"))

    block.register_forward_hook(noted, with_kwargs=True)


def extended(few: Measured, more: Measured) -> Measured:
    """Return the plan with all blocks, estimated from those with a few.

    Bytes, calls and elements grow by the same number with each block. So does the peak of each part of the step: the
    forward, the backward of the first blocks and of the last ones, and the optimizer's step. The peak of all is the
    largest of them.

    ``few`` has ``FEW`` of the blocks, ``more`` has ``MORE``.
    """

    def grown(one: int, other: int) -> int:
        return max(0, other + (other - one) * (more.blocks - more.kept) // (more.kept - few.kept))

    def all_grown(one: Mapping[Any, int], other: Mapping[Any, int]) -> dict[Any, int]:
        return {key: grown(one.get(key, 0), value) for key, value in other.items()}

    names = ["parameters", "trainable", "local_elements", "weights", "gradients", "optimizer", "buffers", "flops"]
    changes: dict[str, Any] = {name: grown(getattr(few, name), getattr(more, name)) for name in names}
    peaks = {}
    for part, (total, kinds) in more.peaks.items():
        if part in few.peaks:
            all_kinds = all_grown(few.peaks[part][1], kinds)
            peaks[part] = grown(few.peaks[part][0], total), all_kinds
    peak, parts = max(peaks.values(), key=lambda one: one[0])
    parts[TEMPORARY] = max(0, parts.get(TEMPORARY, 0) + peak - sum(parts.values()))
    changes["links"] = {
        name: tuple(
            (grown(one[0], other[0]), grown(one[1], other[1]))
            for one, other in zip(few.links[name], parts_of_kind, strict=True)
        )
        for name, parts_of_kind in more.links.items()
    }
    changes["sent"] = {
        name: tuple(grown(one, other) for one, other in zip(few.sent[name], figures, strict=True))
        for name, figures in more.sent.items()
    }
    return replace(more, **changes, peak=peak, peak_parts=parts, peaks=peaks)
