"""Muon for the hidden matrices of a network and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.tree import parameters_of
from hasten.optim.decay import NamedParameters, checked_patterns, trained
from hasten.optim.fused import fused_where_possible

_KINDS = ("muon", "adamw")
# Usual names of output layers, and of matrices of learned vectors that are not ``nn.Embedding``.
_HEADS = frozenset({"head", "lm_head", "classifier", "score"})
_VECTORS = re.compile(r"(^|_)(emb|embed|embedding|embeddings|pos|position|positions|positional|tokens?)(_|$)")


def muon(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    adamw_lr: float | None = None,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
    adamw: Iterable[str] = (),
) -> MuonAdamW:
    """Return one optimizer: Muon for the hidden matrices of a model, AdamW for its other parameters.

    Hidden matrices are the two-dimensional weights, except the weights of embeddings and of the head. Embeddings are
    ``nn.Embedding`` layers and parameters with such names (``pos_embed``, ``class_token``). The head is the last
    ``Linear`` in a module named "head", "lm_head", "classifier" or "score", else the last ``Linear`` of the model; and
    any layer that shares its weight with an embedding. AdamW updates vectors (biases, scales of normalization), which
    do not decay, and convolutions. ``optimizer.param_groups`` lists the names as ``param_names``.

    Muon's iteration multiplies in bfloat16; on a CPU without bfloat16 instructions in 32 bits, which is many times
    faster there and more exact.

    Args:
        model: the model to train; parameters that need no gradient are left out.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW; ``lr`` by default, which suits "match_rms_adamw".
        weight_decay: of both, for matrices.
        momentum: of Muon.
        betas: of AdamW.
        eps: of AdamW.
        adjust_lr_fn: "match_rms_adamw" scales Muon's updates to the size of AdamW's, so that learning rates for
            AdamW fit; "original" is the rule of Muon's author, with a learning rate such as 0.02.
        adamw: parts of the names of further matrices that AdamW updates.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no hidden matrices, or an entry of ``adamw`` matches no parameter.

    Example::

        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
        >>> optimizer = muon(model, lr=1e-3)
        >>> {group["algorithm"]: group["param_names"] for group in optimizer.param_groups[:2]}
        {'muon': ['1.weight'], 'adamw': ['0.weight', '2.weight']}

    Source: Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024; Liu et al., Muon is Scalable for
    LLM Training, 2025; `torch.optim.Muon
    <https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html>`_.

    """
    named = trained(model, "muon")
    patterns = checked_patterns(adamw, named, "muon(adamw=...)")
    outer = _embeddings_and_head(model)
    hidden: NamedParameters = []
    matrices: NamedParameters = []
    vectors: NamedParameters = []
    for name, parameter in named:
        if parameter.ndim < 2:
            vectors.append((name, parameter))
        elif parameter.ndim > 2 or id(parameter) in outer or any(pattern in name for pattern in patterns):
            matrices.append((name, parameter))
        else:
            hidden.append((name, parameter))
    if not hidden:
        raise make_error(
            ValueError,
            f"muon(model): {type(model).__name__} has no hidden matrices: two-dimensional weights other than those of "
            "embeddings and of the last Linear.",
            fix="Use hasten.optim.adamw(model).",
        )
    own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adjust_lr_fn": adjust_lr_fn}
    others = {"lr": lr if adamw_lr is None else adamw_lr, "betas": betas, "eps": eps}
    groups: list[dict[str, Any]] = [{"params": hidden, "algorithm": "muon", **own}]
    for part, decay in ((matrices, weight_decay), (vectors, 0.0)):
        if part:
            groups.append({"params": part, "algorithm": "adamw", **others, "weight_decay": decay})
    return MuonAdamW(groups)


class MuonAdamW(Optimizer):
    """Muon and AdamW with one ``step``, one ``state_dict`` and one list of groups; created by ``muon``.

    Each group has ``algorithm``, "muon" or "adamw", and the options of that algorithm.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        self._make_parts()
        super().__init__(params, {"lr": 1e-3})
        self._share()

    def _make_parts(self) -> None:
        # Their groups are replaced below, but torch requires at least one parameter.
        self._muon = Muon([torch.zeros(1, 1)])
        self._adamw = AdamW([torch.zeros(1)])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without ``algorithm`` it is AdamW's."""
        algorithm = param_group.setdefault("algorithm", "adamw")
        if algorithm not in _KINDS:
            raise make_error(
                ValueError, f"MuonAdamW: a group has algorithm={algorithm!r}.", fix="Use 'muon' or 'adamw'."
            )
        has_names = bool(self.param_groups) and "param_names" in self.param_groups[0]
        if has_names and (plain := _without_names(param_group["params"])) is not None:
            # Either all groups of an optimizer have names, or none.
            start = sum(len(group["params"]) for group in self.param_groups)
            param_group["params"] = [(f"added.{start + i}", p) for i, p in enumerate(plain)]
        inner: Optimizer = self._muon if algorithm == "muon" else self._adamw
        for name, value in inner.defaults.items():
            param_group.setdefault(name, value)
        super().add_param_group(param_group)
        if algorithm == "muon" and any(p.ndim != 2 for p in param_group["params"]):
            self.param_groups.pop()
            raise ValueError("MuonAdamW: a group with algorithm='muon' has parameters that are not matrices.")
        self._share()

    def _share(self) -> None:
        """Make both algorithms use the groups and the state of this optimizer."""
        self._set_groups()
        self._muon.state = self._adamw.state = self.state
        if self._adamw.param_groups:
            fused_where_possible(self._adamw)

    def _set_groups(self) -> None:
        self._muon.param_groups = [group for group in self.param_groups if group["algorithm"] == "muon"]
        self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_muon" not in self.__dict__:  # A copy.
            self._make_parts()
        self._share()

    def fusible_parts(self) -> list[Optimizer]:
        """Return the optimizers that can be fused: AdamW."""
        return [self._adamw]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._set_groups()  # A program may replace groups between steps.
        with _In32Bits() if _emulates_bfloat16(self._muon) else nullcontext():
            self._muon.step()
        self._adamw.step()
        return loss


class _In32Bits(TorchFunctionMode):
    """Make torch's Muon start its iteration with a copy in 32 bits instead of bfloat16."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        # From torch 2.15 on it is tensor.to(dtype=torch.bfloat16, copy=True).
        if function is Tensor.bfloat16 or (function is Tensor.to and given.get("dtype") is torch.bfloat16):
            return args[0].to(torch.float32, copy=True)
        return function(*args, **given)


def _emulates_bfloat16(optimizer: Optimizer) -> bool:
    """Return whether the device of the parameters emulates products in bfloat16."""
    parameters = parameters_of(optimizer)
    return bool(parameters) and parameters[0].is_cpu and not torch_private.cpu_multiplies_bfloat16()


def _without_names(params: Any) -> list[Tensor] | None:
    """Return parameters as a list; None if they have names."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    return None if listed and isinstance(listed[0], tuple) else listed


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings and of the output layer."""
    found: set[int] = set()
    last: Tensor | None = None
    head: Tensor | None = None
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            found.add(id(layer.weight))
        elif isinstance(layer, nn.Linear):
            last = layer.weight
            head = last if _HEADS.intersection(name.split(".")) else head
        found.update(id(p) for own, p in layer.named_parameters(recurse=False) if _VECTORS.search(own))
    answer = last if head is None else head
    return found | {id(answer)} if answer is not None else found
