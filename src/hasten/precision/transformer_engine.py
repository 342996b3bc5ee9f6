"""Linear layers and layer normalization in 8-bit floats, through NVIDIA's Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.extend.origin import comes_from
from hasten.precision.base import DefaultType, DtypePrecision
from hasten.precision.builtin import HalfPrecision
from hasten.precision.float8 import check_float8
from hasten.precision.layers import classes_replaced, put_back, replace

if TYPE_CHECKING:
    from torch.optim import Optimizer

_PURPOSE = "TransformerEnginePrecision"


class TransformerEnginePrecision(DtypePrecision):
    """Linear layers and layer normalization by Transformer Engine, which multiplies in 8-bit floats.

    Layers whose ``in_features`` are not a multiple of 8 or ``out_features`` not a multiple of 16 do not change; the
    rows of a batch must be a multiple of 8. The original layers are restored when the run ends.

    Args:
        weights_dtype: of the parameters.
        recipe: the scaling of tensors: a recipe of ``transformer_engine.common.recipe``, or a dict with the arguments
            of its ``DelayedScaling``; ``DelayedScaling()`` by default.
        replace_layers: whether to replace ``Linear`` and ``LayerNorm``; None: if the module has no layers of
            Transformer Engine yet.
        fallback_compute_dtype: for operations without 8-bit floats; ``weights_dtype`` by default.

    Raises:
        ModuleNotFoundError: transformer_engine is not installed.
        TypeError: an argument has a wrong type.
        ValueError: the device has no 8-bit floats.

    Source: `Transformer Engine <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html>`_.

    """

    precision = "transformer-engine"

    can_be_sharded = False

    def __init__(
        self,
        *,
        weights_dtype: torch.dtype,
        recipe: object = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        allowed = "a type of torch, such as torch.bfloat16"
        check.instance(_PURPOSE, "weights_dtype", weights_dtype, torch.dtype, allowed)
        fallback = fallback_compute_dtype or weights_dtype
        check.instance(_PURPOSE, "fallback_compute_dtype", fallback, torch.dtype, allowed)
        recipes = need("transformer_engine.common.recipe", purpose=_PURPOSE)
        if recipe is None:
            recipe = recipes.DelayedScaling()
        elif isinstance(recipe, Mapping):
            options = dict(recipe)
            if isinstance(options.get("fp8_format"), str):
                options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
            recipe = recipes.DelayedScaling(**options)
        super().__init__(weights_dtype)
        self.weights_dtype = weights_dtype
        self.recipe = recipe
        self.replace_layers = replace_layers
        self.fallback_compute_dtype = fallback
        if weights_dtype == torch.float16:
            self.precision = "transformer-engine-float16"
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def check_device(self, device: torch.device) -> None:
        """Check that the device multiplies 8-bit floats."""
        check_float8(device, "transformer-engine")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with layers of Transformer Engine and parameters of ``weights_dtype``."""
        has_some = any(comes_from(type(layer), "transformer_engine") for layer in module.modules())
        if has_some and self.replace_layers:
            rank_zero_info(f"{_PURPOSE}(replace_layers=True): the module has layers of Transformer Engine; they stay.")
        elif not has_some and self.replace_layers in (None, True):
            self._replaced += replace(module, _replacement)
        return module.to(dtype=self.weights_dtype)

    def convert_optimizer(self, optimizer: Optimizer) -> None:
        """Make the optimizer step in 32 bits where the parameters have 16."""
        if self.weights_dtype != torch.float32:
            HalfPrecision().convert_optimizer(optimizer)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Return a context in which layers of Transformer Engine compute in 8-bit floats."""
        engine = need("transformer_engine.pytorch", purpose=_PURPOSE)
        with (
            DefaultType(self.weights_dtype),
            torch.autocast("cuda", dtype=self.fallback_compute_dtype, cache_enabled=False),
            engine.autocast(enabled=True, recipe=self.recipe),
        ):
            yield

    @contextmanager
    def module_init_context(self) -> Iterator[None]:
        """Return a context in which modules are made with parameters of ``weights_dtype``."""
        layers: dict[str, Any] = {}
        if self.replace_layers:
            engine = need("transformer_engine.pytorch", purpose=_PURPOSE)
            layers = {"Linear": engine.Linear, "LayerNorm": engine.LayerNorm}
        with classes_replaced(layers), DefaultType(self.weights_dtype):
            yield

    def teardown(self) -> None:
        """Restore the original layers."""
        put_back(self._replaced)


def _replacement(name: str, layer: nn.Module) -> nn.Module | None:
    engine = need("transformer_engine.pytorch", purpose=_PURPOSE)
    made: nn.Module
    if type(layer) is nn.Linear:
        if layer.in_features % 8 or layer.out_features % 16:
            rank_zero_warn(
                f"{_PURPOSE}: the layer {name!r} has {layer.in_features} x {layer.out_features} features and is not "
                "replaced: 8-bit floats need multiples of 8 and 16.",
                fix="Round its sizes up to use it.",
            )
            return None
        made = engine.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    elif type(layer) is nn.LayerNorm:
        if layer.weight is None or layer.bias is None or len(layer.normalized_shape) != 1:
            return None
        made = engine.LayerNorm(layer.normalized_shape[0], eps=layer.eps)
    else:
        return None
    # With the same parameters, for optimizers and checkpoints.
    made.weight = layer.weight
    if layer.bias is not None:
        made.bias = layer.bias
    return made
