"""Tensor-parallel plans: which layers are split over the processes of a group, and how each of them computes."""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.tree import is_absent, map_tensors
from hasten.strategies.experts import ExpertStyle, SplitExperts, WholeExperts, sends_tokens
from hasten.strategies.mesh.sizes import is_split

Plan = Mapping[str, ParallelStyle | str] | Literal["auto"]

_SEQUENCE = Shard(1)


class _SplitDropout(ParallelStyle):
    """Dropout of features that are split: each process draws the mask of all features and takes its part.

    So the masks equal those of one process, and the generators of the group stay equal.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        vars(module)["forward"] = functools.partial(_dropped, module, device_mesh.get_local_rank(), device_mesh.size())
        return module


def _dropped(module: Any, rank: int, size: int, input: Tensor) -> Tensor:
    if not module.training or module.p == 0:
        return input
    width = input.shape[-1]
    factors = F.dropout(input.new_ones((*input.shape[:-1], width * size)), module.p)
    return input * factors.narrow(-1, rank * width, width)


class _GatherSequence(ParallelStyle):
    """Gather activations that are split along the sequence before a module computes, once for all of its layers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor) and tensor.placements == (_SEQUENCE,):
                return tensor.redistribute(placements=[Replicate()])
            return tensor

        def gather(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_tensors(whole, args), map_tensors(whole, kwargs)

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class _OfConv1D(ParallelStyle):
    """Splits GPT-2's ``Conv1D``, a linear layer whose weight is (in, out), as ``style`` splits an ``nn.Linear``."""

    def __init__(self, style: Any) -> None:
        super().__init__()
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, by_column = self._style, isinstance(self._style, ColwiseParallel)
        placements = {"weight": Shard(1), "bias": Shard(0)} if by_column else {"weight": Shard(0), "bias": Replicate()}

        def split(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(part.named_parameters(recurse=False)):
                divided = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))

        takes = (Replicate(),) if by_column else (Shard(-1),)
        return distribute_module(
            module,
            device_mesh,
            split,
            functools.partial(torch_private.prepare_input_of_style(style), style.input_layouts, takes),
            functools.partial(_output, style.output_layouts, style.use_local_output),  # type: ignore[arg-type]
        )


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a layer is the ``Conv1D`` of transformers."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int) and hasattr(module, "nx")


def _gathered_output() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def _per_head() -> ParallelStyle:
    # The norm of each head: which dimension the heads are in changes neither its result nor the sum of its gradients.
    return SequenceParallel(sequence_dim=-2, use_local_output=True)


# The names that plans of Hugging Face models use, and those they used before.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gathered_output,
    "colwise_rep": _gathered_output,
    "rowwise_split_input": _split_input,
    "rowwise_rep": _split_input,
    "embedding_rowwise": _split_input,
    "embedding_colwise": _gathered_output,
    "sequence_parallel": functools.partial(SequenceParallel, use_local_output=True),
    "replicated_with_grad_allreduce": _per_head,
    "moe_tp_experts": SplitExperts,
    "ep_dispatch_experts": WholeExperts,
    # hasten's own.
    "expert": WholeExperts,
    "split_dropout": _SplitDropout,
}
_WHOLE = "replicate"

# Layers of torch, whose attention stays whole: one parameter holds the heads of query, key and value, one after the
# other, and no range of its rows holds the same heads of all three.
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_TORCH_PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "linear1": ColwiseParallel,
    "dropout": _SplitDropout,
    "linear2": RowwiseParallel,
}

# Every part knows the number of all heads, so attention computes whole, and its layers gather what they compute.
_T5 = {
    "shared": "embedding_rowwise",
    "*.embed_tokens": "embedding_rowwise",
    "*.block.*.layer.*.*Attention.[qkv]": "colwise_gather_output",
    "*.block.*.layer.*.*Attention.o": "rowwise_split_input",
    "*.block.*.layer.*.DenseReluDense.wi": "colwise",
    "*.block.*.layer.*.DenseReluDense.wi_[01]": "colwise",
    "*.block.*.layer.*.DenseReluDense.dropout": "split_dropout",
    "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}

# Plans for Hugging Face models that have none, relative to the base model.
_READY = {
    "bert": {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    "distilbert": {
        "transformer.layer.*.attention.q_lin": "colwise",
        "transformer.layer.*.attention.k_lin": "colwise",
        "transformer.layer.*.attention.v_lin": "colwise",
        "transformer.layer.*.attention.out_lin": "rowwise",
        "transformer.layer.*.ffn.lin1": "colwise",
        "transformer.layer.*.ffn.lin2": "rowwise",
    },
    "gpt2": {
        "wte": "embedding_rowwise",
        # One layer computes query, key and value: its output is gathered, and attention computes whole.
        "h.*.attn.c_attn": "colwise_gather_output",
        "h.*.attn.c_proj": "rowwise_split_input",
        "h.*.crossattention.c_attn": "colwise_gather_output",
        "h.*.crossattention.q_attn": "colwise_gather_output",
        "h.*.crossattention.c_proj": "rowwise_split_input",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "t5": _T5,
    "mt5": _T5,
}
# The same for the parts that such a model has around its base model.
_READY_AROUND = {"gpt2": {"lm_head": "colwise_gather_output"}}


# Modules that a plan has split.
_split: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Part:
    """A module that a plan splits: its name, torch's style for it, its pattern in the plan, and what holds it."""

    name: str
    module: nn.Module
    style: ParallelStyle
    pattern: str
    owner: nn.Module


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    expert_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """Split the layers of ``model`` over a mesh of one dimension, in place; see ``resolve`` for the arguments.

    Parameters become DTensors. Every process must hold the same values before (or have them on the meta device).
    Parameters that were one tensor, as tied embeddings are, stay one.

    Returns:
        the names of the modules that were split, and the style of each.

    Raises:
        ValueError: the plan does not fit the model or the size of the group; the message names the module.
        TypeError: a style does not split this kind of module.

    Source: `PyTorch, Tensor Parallelism <https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html>`_.

    """
    parts = resolve(
        model,
        plan,
        mesh.size(),
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        expert_parallel=expert_parallel,
    )
    tied = _tied(model)
    for part in parts:
        if not _was_split(part, plan):
            _split_part(part, mesh)
    _tie(tied)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoder) and any(part.owner in layer.layers for part in parts):
            # Nested tensors are for a kernel that takes whole weights.
            layer.use_nested_tensor = False
    return {part.name: part.style for part in parts}


def _was_split(part: Part, plan: Plan) -> bool:
    """Return whether an earlier run, the program itself or ``MeshStrategy(expert=N)`` has split a module."""
    if sends_tokens(part.module) and plan != "auto":
        what = f"MeshStrategy(plan={{...}}, expert=...): {part.pattern!r} names experts, and both divide them."
        raise make_error(ValueError, what, fix="Leave them out of the plan, or leave expert out.", argument="plan")
    # What gathers a sequence comes after the layers inside.
    own = () if isinstance(part.style, _GatherSequence) else part.module.parameters()
    return part.module in _split or sends_tokens(part.module) or any(map(is_split, own))


def _split_part(part: Part, mesh: DeviceMesh) -> None:
    own = dict(part.module.named_parameters())
    absent = {name: parameter for name, parameter in own.items() if is_absent(parameter)}
    if absent and len(absent) == len(own):
        # Another stage of a pipeline has it.
        return
    # Values are equal on all processes, so nothing has to be sent.
    style = _OfConv1D(part.style) if _is_conv1d(part.module) else _waiting(part.style)
    parallelize_module(part.module, mesh, style, src_data_rank=None)
    for parameter in part.module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter.placements == (Replicate(),):
            # Each process has the gradient of its part of the activations: added up before an optimizer reads it.
            parameter.register_hook(_summed)
    for name, parameter in absent.items():
        # Beside one that stages share, such as the bias of an output layer that has the weight of the embedding.
        place, _, key = name.rpartition(".")
        part.module.get_submodule(place).register_parameter(key, parameter)
    _split.add(part.module)


def _waiting(style: ParallelStyle) -> ParallelStyle:
    """Return a style whose layers return plain tensors: torch's are filled later, and no compiled block takes them."""
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return style
    style = copy.copy(style)
    vars(style)["_prepare_output_fn"] = _output
    return style


def _output(
    layouts: tuple[Placement, ...], local: bool, module: nn.Module, output: DTensor, mesh: DeviceMesh
) -> Tensor:
    if output.placements != layouts:
        output = output.redistribute(placements=layouts)
    if layouts == (_SEQUENCE,) and isinstance(module, nn.Embedding):
        # For unequal parts torch returns views with gaps, which the next layer may not accept.
        output = output.clone(memory_format=torch.contiguous_format)  # type: ignore[assignment]
    return output.to_local() if local else output


def _summed(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        return gradient.redistribute(placements=[Replicate()])
    return gradient


def resolve(
    model: nn.Module,
    plan: Plan,
    size: int,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    expert_parallel: bool = False,
) -> list[Part]:
    """Return the modules that ``plan`` splits, after checking that each can be split over ``size`` processes.

    Args:
        model: the model; it does not change.
        plan: a dict of name patterns, such as ``"model.layers.*.mlp.up_proj"``, in which ``*`` stands for anything
            between two dots, and torch's ``ParallelStyle`` objects, or the names of styles that Hugging Face uses
            (``"colwise"``, ``"rowwise"``, ...). "auto" takes the plan that the model has.
        size: the number of processes of a group.
        sequence_parallel: split the activations between blocks along the sequence; with "auto" only.
        loss_parallel: leave the logits split over the classes; with "auto", the logits of the output layer.
        expert_parallel: with "auto", divide whole experts over the processes, instead of splitting the matrices of
            each; other layers are split as without it.

    Raises:
        ValueError: the plan does not fit the model or the size of the group; the message names the module.
        TypeError: a style does not split this kind of module.

    Example::

        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> [part.name for part in resolve(model, {"0": "colwise", "2": "rowwise"}, size=2)]
        ['0', '2']

    """
    if plan == "auto":
        named = _automatic(model, expert_parallel)
        if sequence_parallel:
            _split_sequence(model, named)
        if loss_parallel:
            _split_loss(model, named, sequence_parallel)
    else:
        if sequence_parallel:
            raise make_error(
                ValueError,
                "plan={...}, sequence_parallel=True: it completes plan='auto'.",
                fix=(
                    "In a plan of your own, give the norms SequenceParallel() and the layers beside them input_layouts "
                    "and output_layouts of Shard(1)."
                ),
                argument="plan",
            )
        if expert_parallel:
            what = "plan={...}, expert_parallel=True: it completes plan='auto'."
            fix = "In a plan of your own, give the modules that hold the experts the style 'expert'."
            raise make_error(ValueError, what, fix=fix, argument="plan")
        named = _written(model, plan)
        if loss_parallel and not any(_returns_split_logits(style) for style, _ in named.values()):
            what = "plan={...}, loss_parallel=True: no layer returns logits that are split over the classes."
            fix = "Give the output layer ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)."
            raise make_error(ValueError, what, fix=fix, argument="plan")
    modules = dict(model.named_modules())
    parts = [
        Part(name, modules[name], style, pattern, modules[name.rpartition(".")[0]])
        for name, (style, pattern) in named.items()
    ]
    for part in parts:
        _check(part, size)
        if isinstance(part.style, ExpertStyle):
            part.style.check(part.module, size, f"plan=...: {part.name!r}")
    return parts


# Module name -> its style, and its name pattern in the plan.
_Named = dict[str, tuple[ParallelStyle, str]]


def _written(model: nn.Module, plan: Mapping[str, ParallelStyle | str]) -> _Named:
    named: _Named = {}
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        found = list(_matching(pattern, names))
        if not found:
            generic = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names if name})
            what = f"plan={{{pattern!r}: ...}}: {type(model).__name__} has no module of this name."
            fix = f"{did_you_mean(pattern, generic) or f' Its modules are, among others: {_some(generic)}.'}"
            raise make_error(ValueError, what, fix=fix, argument="plan")
        for name in found:
            if name in named:
                what = f"plan={{...}}: {named[name][1]!r} and {pattern!r} both name {name!r}."
                raise make_error(ValueError, what, fix="Leave one out.", argument="plan")
            if style != _WHOLE:
                named[name] = (_style(style, pattern), pattern)
    return named


def _automatic(model: nn.Module, expert_parallel: bool) -> _Named:
    named: _Named = {}
    for prefix, module in model.named_modules():
        own, base = _own_plan(module, expert_parallel)
        prefix = ".".join(filter(None, (prefix, base)))
        part = module.get_submodule(base)
        inner = [name for name, _ in part.named_modules()] if own else []
        of_parameters: dict[str, str] = {}
        for pattern, style in own.items():
            full = ".".join(filter(None, (prefix, pattern)))
            found = list(_matching(pattern, inner))
            if not found:
                of_parameters[pattern] = style
            for name in found:
                whole = ".".join(filter(None, (prefix, name)))
                # Outer plans contain the plans of their parts, and come first.
                if style != _WHOLE and whole not in named:
                    named[whole] = (_style(style, full), full)
        if of_parameters:
            _check_parameters(part, prefix, of_parameters, named)
        if isinstance(module, _TORCH_LAYERS):
            for pattern, make in _TORCH_PLAN.items():
                named.setdefault(f"{prefix}.{pattern}".lstrip("."), (make(), pattern))
    _check_found(model, named, expert_parallel)
    return named


def _check_found(model: nn.Module, named: _Named, expert_parallel: bool) -> None:
    """Refuse a model without a plan, or without experts where they are asked for."""
    if not named:
        ready = ", ".join(_READY)
        raise make_error(
            ValueError,
            f"plan='auto': {type(model).__name__} has no plan: it holds neither a Hugging Face model with a "
            f"tp_plan (or {ready}) nor an nn.TransformerEncoderLayer.",
            fix="Pass plan={pattern: style}.",
            argument="plan",
        )
    if expert_parallel and not any(isinstance(style, WholeExperts) for style, _ in named.values()):
        what = f"plan='auto', expert_parallel=True: no plan in {type(model).__name__} names experts."
        fix = "Leave it out, or give the modules that hold the experts the style 'expert': plan={pattern: 'expert'}."
        raise make_error(ValueError, what, fix=fix, argument="plan")


def _check_parameters(module: nn.Module, prefix: str, patterns: Mapping[str, str], named: _Named) -> None:
    """Refuse parameters that a plan divides, but for those of experts, which are divided with their module."""
    names = [name for name, _ in module.named_parameters()]
    for pattern, style in patterns.items():
        for name in _matching(pattern, names):
            owner, _, own = ".".join(filter(None, (prefix, name))).rpartition(".")
            of_owner, _ = named.get(owner, (None, ""))
            if style == _WHOLE or (isinstance(of_owner, ExpertStyle) and of_owner.takes(own, style)):
                continue
            raise make_error(
                ValueError,
                f"plan='auto': the plan of the model gives the parameter {f'{owner}.{own}'!r} the style "
                f"{style!r}, which hasten has for layers and experts only.",
                fix="Pass plan={pattern: style} with the layers to split.",
                argument="plan",
            )


def _own_plan(module: nn.Module, expert_parallel: bool = False) -> tuple[Mapping[str, str], str]:
    """Return the plan that a module carries, and the name of the part of it that the plan is about ("" for itself).

    With ``expert_parallel``, what its plan for whole experts says takes the place of what the other says.
    """
    for attribute in ("_tp_plan", "tp_plan"):
        plan = getattr(module, attribute, None)
        if isinstance(plan, Mapping) and plan:
            return _with_experts(plan, getattr(module, "_ep_plan", None), expert_parallel), ""
    config = getattr(module, "config", None)
    if config is None:
        return {}, ""
    kind = getattr(config, "model_type", "")
    if not _is_base(module):
        return _READY_AROUND.get(kind, {}), ""
    plan = getattr(config, "base_model_tp_plan", None)
    plan = _with_experts(plan or {}, getattr(config, "base_model_ep_plan", None), expert_parallel)
    return plan or _READY.get(kind, {}), ""


def _with_experts(plan: Mapping[str, str], experts: Any, expert_parallel: bool) -> Mapping[str, str]:
    return {**plan, **experts} if expert_parallel and isinstance(experts, Mapping) else plan


def _is_base(module: nn.Module) -> bool:
    return getattr(module, "base_model", None) is module


def _style(style: object, pattern: str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if isinstance(style, str) and style in _STYLES:
        return _STYLES[style]()
    given = f"plan=...: the style {style!r} of {pattern!r}"
    if isinstance(style, str):
        known = [*_STYLES, _WHOLE]
        what = f"{given} has no counterpart in torch.distributed.tensor.parallel. hasten knows {', '.join(known)}."
        raise make_error(ValueError, what, fix=did_you_mean(style, known))
    hint = f" Write {style.__name__}()." if isinstance(style, type) and issubclass(style, ParallelStyle) else ""
    raise make_error(TypeError, f"{given} is not a torch ParallelStyle or the name of one.", fix=hint)


def _matching(pattern: str, names: list[str]) -> Iterator[str]:
    tokens = pattern.split(".")
    for name in names:
        own = name.split(".")
        # Only an empty pattern matches the model itself, whose name is empty.
        if len(own) == len(tokens) and all(map(fnmatchcase, own, tokens)) and bool(name) == bool(pattern):
            yield name


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4]))


# -- what can be split


def _check(part: Part, size: int) -> None:
    module, style = part.module, part.style
    where = f"plan=...: {part.name!r}"
    if isinstance(module, nn.MultiheadAttention) or isinstance(part.owner, nn.MultiheadAttention):
        raise make_error(
            TypeError,
            f"{where} is (in) an nn.MultiheadAttention, which computes with one parameter that holds the heads of "
            "query, key and value.",
            fix="Leave it out of the plan: attention then computes whole in each process.",
        )
    if isinstance(style, _SplitDropout) and type(module) is not nn.Dropout:
        raise TypeError(f"{where} is a {type(module).__name__}, and 'split_dropout' is for nn.Dropout only.")
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    if not (isinstance(module, (nn.Linear, nn.Embedding)) or _is_conv1d(module)):
        raise make_error(
            TypeError,
            f"{where} is a {type(module).__name__}, and {type(style).__name__} splits nn.Linear and nn.Embedding only.",
            fix="Name the layers inside it.",
        )
    if isinstance(style, ColwiseParallel):
        # A layer between DTensors may be split into unequal parts, as the words of a vocabulary are.
        splits, field = style.use_local_output and style.output_layouts != (Replicate(),), "out_features"
    else:
        splits, field = style.input_layouts != (Replicate(),), "in_features"
    width = getattr(module, {"out_features": "nf", "in_features": "nx"}[field] if _is_conv1d(module) else field, size)
    if splits and width % size:
        what = f"{where} has {field}={width}, which {size} processes cannot share equally."
        fix = f"Choose a tensor-parallel size that divides {width}, or leave this layer out of the plan."
        raise make_error(ValueError, what, fix=fix)
    if splits and isinstance(style, ColwiseParallel):
        _check_heads(part, size)


def _check_heads(part: Part, size: int) -> None:
    """Refuse a layer whose parts would not hold whole heads."""
    dim = next((dim for name in ("head_dim", "attention_head_size") if (dim := getattr(part.owner, name, None))), None)
    width = getattr(part.module, "out_features", 0)
    if not isinstance(dim, int) or width % dim:
        return
    heads = width // dim
    if heads % size:
        config = getattr(part.owner, "config", None)
        fields = ["num_attention_heads", "num_key_value_heads"]
        if part.name.rpartition(".")[2][:1] in "kv":
            fields.reverse()
        field = next((field for field in fields if getattr(config, field, None) == heads), "heads")
        what = f"plan=...: {part.name!r} has {field}={heads}, which {size} processes cannot share equally."
        raise make_error(ValueError, what, fix=f"Choose a tensor-parallel size that divides {heads}.", argument="plan")


# -- parameters that several modules share

_Places = list[tuple[nn.Module, str, str]]


def _tied(model: nn.Module) -> list[_Places]:
    """Return, for each parameter that several modules hold, the modules, its names in them, and its full names."""
    places: dict[int, _Places] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}".lstrip(".")))
    return [found for found in places.values() if len(found) > 1]


def _tie(tied: list[_Places]) -> None:
    for (first, first_name, first_full), *others in tied:
        shared = getattr(first, first_name)
        for module, name, full in others:
            own = getattr(module, name)
            if own is shared:
                continue
            if getattr(own, "placements", None) != getattr(shared, "placements", None):
                what = f"plan=...: {first_full!r} and {full!r} are one parameter, and the plan splits them differently."
                fix = "Name both with styles that split the same dimension, or leave both out."
                raise make_error(ValueError, what, fix=fix, argument="plan")
            module.register_parameter(name, shared)


# -- sequence_parallel and loss_parallel with plan="auto"


def _returns_split_logits(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and not style.use_local_output and style.output_layouts == (Shard(-1),)


def _split_loss(model: nn.Module, named: _Named, sequence_parallel: bool) -> None:
    """Make the output layer leave its logits split, as ``loss_parallel`` needs them."""
    output = _output_layers(model, named)
    if len(output) != 1:
        found = _some(output) if output else "none"
        what = (
            f"plan='auto', loss_parallel=True: it needs one output layer that the plan splits by columns, "
            f"and {type(model).__name__} has {found}."
        )
        raise make_error(ValueError, what, fix="Leave out loss_parallel, or pass plan={...}.", argument="plan")
    layout = _SEQUENCE if sequence_parallel else Replicate()
    style = ColwiseParallel(input_layouts=layout, output_layouts=Shard(-1), use_local_output=False)
    named[output[0]] = (style, named[output[0]][1])


def _output_layers(model: nn.Module, named: _Named) -> list[str]:
    """Return the names of the linear layers whose output the plan splits and gathers."""
    modules = dict(model.named_modules())
    return [
        name
        for name, (style, _) in named.items()
        if isinstance(style, ColwiseParallel)
        and style.output_layouts == (Replicate(),)
        and isinstance(modules[name], nn.Linear)
        and "." not in _inside_carrier(model, name)
    ]


def _inside_carrier(model: nn.Module, name: str) -> str:
    """Return a module's name within the innermost module around it that has a plan or is the model."""
    tokens = name.split(".")
    for end in range(len(tokens) - 1, 0, -1):
        plan, _ = _own_plan(model.get_submodule(".".join(tokens[:end])))
        if plan:
            return ".".join(tokens[end:])
    return name


def _split_sequence(model: nn.Module, named: _Named) -> None:
    """Change the plan of Hugging Face decoders so that activations between blocks are split along the sequence."""
    carriers = [(name, module) for name, module in model.named_modules() if _is_base(module) and _own_plan(module)[0]]
    if not carriers:
        raise _no_sequence(model, "no Hugging Face decoder in it")
    experts = next((name for name, (style, _) in named.items() if isinstance(style, ExpertStyle)), None)
    if experts is not None:
        raise _no_sequence(model, f"{experts} has experts, whose router reads the whole sequence")
    for name, base in carriers:
        _split_sequence_of(model, named, name, base)
    outputs = _output_layers(model, named)
    for name in outputs:
        named[name] = (ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate()), named[name][1])
    if not outputs:
        raise _no_sequence(model, "no output layer that the plan splits, which would gather the sequence")


def _split_sequence_of(model: nn.Module, named: _Named, name: str, base: nn.Module) -> None:
    prefix = f"{name}." if name else ""
    layers, last, words = (getattr(base, part, None) for part in ("layers", "norm", "embed_tokens"))
    if not (isinstance(layers, nn.ModuleList) and _is_norm(last) and isinstance(words, nn.Embedding)):
        raise _no_sequence(model, f"{type(base).__name__} is not built of embed_tokens, layers and norm")
    if f"{prefix}embed_tokens" not in named:
        raise _no_sequence(model, "its plan does not split embed_tokens")
    gathers = RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE, use_local_output=False)
    named[f"{prefix}embed_tokens"] = (gathers, "embed_tokens")
    named[f"{prefix}norm"] = (SequenceParallel(), "norm")
    for index, layer in enumerate(layers):
        for child, module in layer.named_children():
            place = f"{prefix}layers.{index}.{child}"
            planned = [other for other in named if other.startswith(f"{place}.")]
            if _is_norm(module):
                named[place] = (SequenceParallel(), child)
            elif planned:
                named[place] = (_GatherSequence(), child)
                for other in planned:
                    style, pattern = named[other]
                    if isinstance(style, RowwiseParallel):
                        out = RowwiseParallel(
                            input_layouts=style.input_layouts[0], output_layouts=_SEQUENCE, use_local_output=False
                        )
                        named[other] = (out, pattern)
            elif next(module.parameters(), None) is not None or getattr(module, "p", None):
                raise _no_sequence(model, f"{place} is neither a norm nor split by its plan")


def _is_norm(module: object) -> bool:
    return isinstance(module, nn.Module) and "Norm" in type(module).__name__ and not list(module.children())


def _no_sequence(model: nn.Module, reason: str) -> ValueError:
    what = f"plan='auto', sequence_parallel=True: {type(model).__name__}: {reason}."
    fix = "Leave out sequence_parallel, or pass plan={...} with SequenceParallel() styles."
    return make_error(ValueError, what, fix=fix, argument="plan")
