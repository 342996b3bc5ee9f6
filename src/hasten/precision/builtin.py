"""Mixed, half and double precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from hasten._lib import check, torch_private
from hasten._lib.device import as_device, is_cuda, is_host
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import without_unknown
from hasten._lib.rank_zero import warn_once
from hasten.precision.base import DtypePrecision, Precision, T, to_floating
from hasten.precision.small_updates import keep_small_updates

# Parameters and computation in 16 bits, and computation alone.
HalfName: TypeAlias = Literal["bf16-true", "16-true"]
MixedName: TypeAlias = Literal["16-mixed", "bf16-mixed"]


def is_half(name: str) -> TypeGuard[HalfName]:
    """Return whether this is the name of a precision with parameters of 16 bits."""
    return name in get_args(HalfName)


def is_mixed(name: str) -> TypeGuard[MixedName]:
    """Return whether this is the name of a precision that computes in 16 bits, with parameters of 32."""
    return name in get_args(MixedName)


class DoublePrecision(DtypePrecision):
    """Parameters, inputs and computation in 64-bit floats."""

    precision = "64-true"
    # Loading 64-bit weights into parameters of 32 bits would round them.
    converts_before_loading = True

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with 64-bit parameters."""
        return module.double()


class HalfPrecision(DtypePrecision):
    """Parameters, inputs and computation in 16-bit floats; no update of a parameter is lost.

    Optimizers step parameters in 32 bits, which they keep with their 32-bit states; the module's are these, rounded.
    A parameter that the program sets is taken from the module. The
    running statistics of batch normalization stay in 32 bits. Compute sums over many logits in 32 bits, too:
    ``cross_entropy(logits.float(), targets)``.

    Args:
        precision: "bf16-true" or "16-true".
        keep_small_updates: if False, the optimizer computes in the parameters' 16 bits. This needs less memory, and
            loses updates smaller than about 0.4 % (bf16) or 0.05 % (fp16) of a parameter.

    Raises:
        ValueError: the precision has another value.

    Example::

        >>> HalfPrecision("bf16-true").convert_module(nn.Linear(2, 1)).weight.dtype
        torch.bfloat16

    Source: Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018 (a 32-bit master
    copy of the weights); Zamirai et al., Revisiting BFloat16 Training, 2020.

    """

    def __init__(self, precision: HalfName = "16-true", *, keep_small_updates: bool = True) -> None:
        check.declared(HalfPrecision.__init__, locals())
        check.one_of("HalfPrecision", "precision", precision, get_args(HalfName))
        check.boolean("HalfPrecision", "keep_small_updates", keep_small_updates)
        self.precision = precision
        self.keep_small_updates = keep_small_updates
        super().__init__(torch.bfloat16 if precision == "bf16-true" else torch.float16)

    def check_device(self, device: torch.device) -> None:
        """Check that the device supports bfloat16 if the precision needs it."""
        if self.precision == "bf16-true":
            check_bfloat16(device, self.precision, instead="16-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with 16-bit parameters; layers with running statistics stay in 32 bits."""
        kept = [
            (tensors, name, tensor.data)
            for layer in module.modules()
            if isinstance(layer, torch_private.NormBase) and layer.track_running_stats
            for tensors in (layer._parameters, layer._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and tensor.is_floating_point()
        ]
        module = module.to(dtype=self._dtype)
        for tensors, name, data in kept:
            tensor = tensors[name]
            assert tensor is not None
            tensor.data = data.to(torch.float32)
        return module

    def convert_optimizer(self, optimizer: Optimizer) -> None:
        """Make the optimizer step in 32 bits."""
        if self.keep_small_updates and isinstance(optimizer, Optimizer):
            keep_small_updates(optimizer)


def scaler_for(
    owner: str, precision: str, scaler: torch.amp.GradScaler | None, device: str
) -> torch.amp.GradScaler | None:
    """Return the gradient scaler of a mixed precision: the user's, a new one, or none for bfloat16."""
    if precision == "16-mixed":
        return torch.amp.GradScaler(device=device) if scaler is None else scaler
    if scaler is not None:
        raise MisconfigurationException(
            f"{owner}({precision!r}, scaler=...): bfloat16 needs no scaler.", fix="Leave it out.", argument="scaler"
        )
    return None


class MixedPrecision(Precision):
    """Parameters in 32-bit floats, computation in 16-bit floats where that is safe.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the kind of device: "cuda", "cpu", "mps".
        scaler: your own GradScaler; "16-mixed" creates one by default.
        fast_attention: compute torch's attention of up to 512 tokens without dropout by products of whole matrices,
            with "bf16-mixed" on a CPU that has bfloat16 instructions and no AMX units. It takes about half as long as
            torch's. Scores are rounded to bfloat16 before the softmax, as where attention is written out, and weights
            of attention are kept for backward, which needs memory. With a mask, with fewer heads of keys than of
            queries, and without bfloat16 instructions, it is computed in 32 bits. Otherwise nothing changes.

    Raises:
        ValueError: the precision has another value, or bfloat16 is given a scaler.

    Example::

        >>> MixedPrecision("bf16-mixed", "cpu", fast_attention=True).precision
        'bf16-mixed'

    Source: Micikevicius et al., Mixed Precision Training, 2018; https://pytorch.org/docs/stable/amp.html

    """

    @without_unknown
    def __init__(
        self,
        precision: MixedName = "16-mixed",
        device: str = "cuda",
        scaler: torch.amp.GradScaler | None = None,
        *,
        fast_attention: bool = False,
    ) -> None:
        check.declared(MixedPrecision.__init__, locals())
        check.one_of("MixedPrecision", "precision", precision, get_args(MixedName))
        named = as_device("MixedPrecision", device)
        device = device if named is None else named.type
        self.precision = precision
        self.device = device
        self.scaler = scaler_for("MixedPrecision", precision, scaler, device)
        self._dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        # Steps get their batches as they are: autocast converts the inputs of operations that it computes in 16 bits.
        self._input_dtype: torch.dtype | None = None
        self._attends_fast = fast_attention and precision == "bf16-mixed" and device == "cpu"
        # Exists while modules are trained with it.
        self._attention: object = None

    def convert_inputs(self, *, to_16_bits: bool = False) -> None:
        """Convert floating-point inputs of forward, as Fabric does: to 32 bits, or to 16 bits as Lightning's Fabric.

        In 32 bits inputs that autocast does not convert, such as positions, keep their digits.
        """
        self._input_dtype = self._dtype if to_16_bits else torch.float32

    def check_device(self, device: torch.device) -> None:
        """Check that the device supports bfloat16 if the precision needs it."""
        if self.precision == "bf16-mixed":
            check_bfloat16(device, self.precision, instead="16-mixed")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module``; from here to ``teardown`` ``fast_attention`` has its effect."""
        if self._attends_fast:
            # Imported only here: few runs need it.
            from hasten.precision.attention import fast_attention

            self._attention = fast_attention()
        return module

    def teardown(self) -> None:
        """End what ``convert_module`` has begun."""
        self._attention = None

    def convert_input(self, data: T) -> T:
        """Return ``data``, with other floating tensors after ``convert_inputs``."""
        return data if self._input_dtype is None else to_floating(data, self._input_dtype)

    def convert_output(self, data: T) -> T:
        """Return ``data`` with floating tensors of torch's default type."""
        return to_floating(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast."""
        return self.autocast_context_manager()

    def autocast_context_manager(self) -> torch.autocast:
        """Return autocast that keeps no converted weights: a step may change weights and use them again, as GANs do."""
        return torch.autocast(self.device, dtype=self._dtype, cache_enabled=False)


def check_bfloat16(device: torch.device, precision: str, *, instead: str) -> None:
    """Check that a device computes in bfloat16; warn of a CPU without instructions for it."""
    if is_host(device) and not torch_private.cpu_multiplies_bfloat16():
        warn_once(
            "bfloat16 on the CPU",
            f"precision={precision!r}: this CPU has no bfloat16 instructions: a matrix product takes tens of times as "
            "long as in 32 bits.",
            fix="Use precision='32-true', unless you only try the program out here.",
        )
    if is_cuda(device) and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            what = (
                f"precision={precision!r}: {torch.cuda.get_device_name(device)} has the compute capability "
                f"{major}.{minor}, and bfloat16 begins with 8.0 (Ampere)."
            )
            raise make_error(ValueError, what, fix=f"Use precision={instead!r}.", argument="precision")
