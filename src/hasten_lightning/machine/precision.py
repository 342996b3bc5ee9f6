"""Methods that Lightning's precision plugins have, implemented with hasten's methods."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FirstMixedPrecision


class TrainerPrecisionMethods(Precision):
    """Methods of the Trainer's precision plugins: losses are scaled in ``pre_backward``, as in Lightning."""

    # Objects keep the layout of hasten's classes.
    __slots__ = ()

    backward_takes_optimizer = True

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Return the module, optimizers and schedulers in the form in which they are trained."""
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        """Return the loss, scaled if there is a scaler."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)

    def backward(
        self,
        tensor: torch.Tensor,
        model: nn.Module | None = None,
        optimizer: object = None,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Compute gradients of a loss with ``backward`` of the module; ``optimizer`` is the one that steps next."""
        module: Any = model
        module.backward(tensor, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> torch.Tensor:
        """Return the loss without its graph."""
        return tensor.detach()

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a training step computes."""
        return self.forward_context()

    val_step_context = test_step_context = predict_step_context = train_step_context


class UnconvertedIfMixed(Precision):
    """``convert_module`` of ``DeepSpeedPrecision``: with "mixed" the engine converts the module itself."""

    __slots__ = ()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module in this precision with "true", and unchanged with "mixed"."""
        return super().convert_module(module) if self.precision.endswith("-true") else module


class ShardedMethods(Precision):
    """Attributes of ``FSDPPrecision``."""

    __slots__ = ()

    @property
    def mixed_precision_config(self) -> FirstMixedPrecision:
        """The number formats, for torch's first FSDP."""
        from torch.distributed.fsdp import MixedPrecision

        if self.precision in ("16-true", "bf16-true"):
            rank_zero_warn(
                f"FSDPPrecision({self.precision!r}) enables computation in lower precision, and torch's first FSDP "
                "keeps a copy of the parameters in full precision besides."
            )
        dtype = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}[self.precision.partition("-")[0]]
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
