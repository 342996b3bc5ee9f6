"""Linear layers with weights of four or eight bits, through bitsandbytes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten.precision.base import DtypePrecision, Precision
from hasten.precision.builtin import HalfName, HalfPrecision
from hasten.precision.layers import check_ignored, check_names, ignored, replace

if TYPE_CHECKING:
    from torch.optim import Optimizer

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


class BitsandbytesPrecision(DtypePrecision):
    """Linear layers keep their weights in four or eight bits; everything else computes in ``dtype``.

    The weights of these layers are constants, except for "int8-training": train other parameters, such as low-rank
    adapters. The weights are quantized when the run starts and stay quantized in the module. Checkpoints contain them
    quantized; quantized and unquantized weights can be loaded.

    Args:
        mode: "nf4" and "fp4" for four bits, with "-dq" for quantized scales; "int8" for eight bits; "int8-training"
            for 16-bit weights that are multiplied in eight bits and can be trained.
        dtype: of the computation; by default bfloat16 if the device supports it, otherwise float16; always float16
            for "int8".
        ignore_modules: names of modules whose linear layers do not change, for example {"lm_head"}.

    Raises:
        ValueError: the mode, dtype or a module name is not valid.
        ModuleNotFoundError: bitsandbytes is not installed.

    Source: Dettmers et al., QLoRA, 2023, and LLM.int8(), 2022; `bitsandbytes
    <https://huggingface.co/docs/bitsandbytes>`_.

    """

    precision = "bitsandbytes"
    converts_before_loading = True

    can_be_sharded = False

    def __init__(
        self,
        mode: Literal["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"],
        dtype: torch.dtype | None = None,
        ignore_modules: Iterable[str] | None = None,
    ) -> None:
        check.one_of("BitsandbytesPrecision", "mode", mode, MODES)
        check_names("BitsandbytesPrecision", ignore_modules)
        if dtype is None:
            no_bf16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
            dtype = torch.float16 if mode.startswith("int8") or no_bf16 else torch.bfloat16
        if mode.startswith("int8") and dtype is not torch.float16:
            what = f"BitsandbytesPrecision(mode={mode!r}, dtype={dtype}): products in eight bits give float16."
            raise make_error(ValueError, what, fix="Use dtype=torch.float16, or leave it out.", argument="mode")
        check.one_of("BitsandbytesPrecision", "dtype", dtype, (torch.bfloat16, torch.float16, torch.float32))
        _bitsandbytes()
        self.mode = mode
        self.dtype = dtype
        super().__init__(dtype)
        self.ignore_modules = frozenset(ignore_modules or ())
        names: dict[torch.dtype, HalfName] = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
        self._rest = HalfPrecision(names[dtype]) if dtype in names else Precision()

    def check_device(self, device: torch.device) -> None:
        """Check that bitsandbytes has kernels for the device."""
        known = (
            {"cuda"}
            if self.mode == "int8-training"
            else set(getattr(_bitsandbytes(), "supported_torch_devices", ("cuda",)))
        )
        if device.type not in known:
            what = (
                f"BitsandbytesPrecision(mode={self.mode!r}): this version of bitsandbytes does not support "
                f"{device.type.upper()}; it supports {', '.join(sorted(known))}."
            )
            raise make_error(ValueError, what, fix="Use precision='bf16-true'.", argument="mode")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with quantized linear layers; they quantize when the module moves to a device."""
        kinds = _layers(_bitsandbytes())
        if any(isinstance(layer, tuple(kinds.values())) for layer in module.modules()):
            return module
        if not any(type(layer) is nn.Linear for layer in module.modules()):
            what = f"BitsandbytesPrecision: {type(module).__name__} has no Linear layers to quantize."
            raise make_error(TypeError, what, fix="Use precision='bf16-true'.")
        check_ignored(module, self.ignore_modules, "BitsandbytesPrecision")
        self._rest.convert_module(module)

        def convert(name: str, layer: nn.Module) -> nn.Module | None:
            if type(layer) is not nn.Linear or ignored(name, self.ignore_modules):
                return None
            return self._quantized(layer)

        if not replace(module, convert):
            raise make_error(
                ValueError,
                f"BitsandbytesPrecision(ignore_modules={set(self.ignore_modules)!r}): that leaves no layer to "
                "quantize.",
                argument="ignore_modules",
            )
        return module

    def _quantized(self, layer: nn.Linear) -> nn.Module:
        kinds = _layers(_bitsandbytes())
        sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
        options: dict[str, Any] = {"has_fp16_weights": self.mode == "int8-training", "threshold": 6.0}
        if not self.mode.startswith("int8"):
            options = {
                "compute_dtype": self.dtype,
                "compress_statistics": self.mode.endswith("-dq"),
                "quant_type": self.mode[:3],
            }
        kind = kinds["int8" if self.mode.startswith("int8") else "4bit"]
        made: Any = kind(*sizes, bias=has_bias, device="meta", **options)
        made.hold(layer.weight.data)
        made.bias = layer.bias
        quantized: nn.Module = made
        return quantized

    def convert_optimizer(self, optimizer: Optimizer) -> None:
        """Make the optimizer step in 32 bits."""
        self._rest.convert_optimizer(optimizer)


def _bitsandbytes() -> ModuleType:
    with warnings.catch_warnings():
        # It warns of missing GPUs, which check_device reports.
        warnings.simplefilter("ignore")
        return need("bitsandbytes", purpose="BitsandbytesPrecision")


@functools.cache
def _layers(bnb: Any) -> dict[str, Any]:
    """Return subclasses of bitsandbytes' layers that load both quantized and unquantized weights."""

    class LoadsBoth:
        def _load_from_state_dict(
            self: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
        ) -> None:
            key = f"{prefix}weight"
            taken = key in state_dict and self.take(state_dict, key)
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)  # type: ignore[misc]
            if taken and key in missing:
                missing.remove(key)

    class Linear4bit(LoadsBoth, bnb.nn.Linear4bit):
        def hold(self, weight: torch.Tensor) -> None:
            old: Any = self.__dict__["_parameters"]["weight"]
            names = ("compress_statistics", "quant_type", "quant_storage")
            options = {name: getattr(old, name) for name in names}
            self.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=self, **options)

        def take(self, state_dict: dict[str, Any], key: str) -> bool:
            weight, device = state_dict.pop(key), self.weight.device
            start = f"{key}."
            scales = {name[len(start) :]: state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
            if scales:
                self.weight = bnb.nn.Params4bit.from_prequantized(weight, scales, device=device, module=self)
                return True
            quantized = self.weight.quant_state is not None
            self.hold(weight.to(self.compute_dtype))
            if quantized:
                self.weight = self.weight.to(device)
            return True

    class Linear8bit(LoadsBoth, bnb.nn.Linear8bitLt):
        def hold(self, weight: torch.Tensor) -> None:
            trains = self.state.has_fp16_weights
            self.weight = bnb.nn.Int8Params(weight, has_fp16_weights=trains, requires_grad=trains)

        def take(self, state_dict: dict[str, Any], key: str) -> bool:
            if not state_dict[key].is_floating_point() or self.weight.is_floating_point():
                if self.weight.SCB is None and self.state.SCB is not None:
                    self.weight.SCB = self.state.SCB  # bitsandbytes expects the attribute here.
                return False
            device = self.weight.device
            self.hold(state_dict.pop(key).to("cpu", torch.float16))
            self.weight = self.weight.to(device)
            self.state.CB = self.state.SCB = None
            return True

    return {"4bit": Linear4bit, "int8": Linear8bit}
