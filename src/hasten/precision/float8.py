"""Matrix products in 8-bit floats, through torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.device import is_cuda
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten.precision.builtin import MixedPrecision
from hasten.precision.layers import check_ignored, check_names, ignored, put_back, replace

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Sides of matrices must be multiples of this for 8-bit products.
_MULTIPLE = 16


class Float8Precision(MixedPrecision):
    """Linear layers multiply in 8-bit floats, everything else computes as with "bf16-mixed"; weights stay in 32 bits.

    It is faster for wide layers (a few thousand features) together with ``compile``, which fuses the conversions with
    the operations before them. Layers whose sides are not multiples of 16 do not change. The original layers are
    restored when the run ends, and ``state_dict`` always has the same names and types.

    Args:
        recipe: "tensorwise", one scale per tensor (fastest); "rowwise", one per row (more exact);
            "rowwise_with_gw_hp", also with gradients of weights in bfloat16 (most exact).
        ignore_modules: names of modules that stay in bfloat16 with all their layers, for example {"lm_head"}.
        emulate: round to 8-bit floats and multiply in 32 bits. Slow; for trying a model on any device.

    Raises:
        ValueError: the recipe does not exist, the device has no 8-bit floats, or no layer can be converted.
        ModuleNotFoundError: torchao is not installed.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; `torchao.float8
    <https://docs.pytorch.org/ao/stable/api_reference/api_ref_float8.html>`_.

    """

    can_be_sharded = False

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        *,
        ignore_modules: Iterable[str] = (),
        emulate: bool = False,
    ) -> None:
        check.declared(Float8Precision.__init__, locals())
        check.one_of("Float8Precision", "recipe", recipe, RECIPES)
        check_names("Float8Precision", ignore_modules)
        need("torchao", purpose="precision='fp8'")
        super().__init__("bf16-mixed", "cuda")
        self.precision = "fp8"
        self.recipe = recipe
        self.ignore_modules = tuple(ignore_modules)
        self.emulate = emulate
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def check_device(self, device: torch.device) -> None:
        """Check that the device multiplies 8-bit floats."""
        if not self.emulate:
            check_float8(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with linear layers that multiply in 8-bit floats, on the same parameters."""
        float8 = need("torchao.float8", purpose="precision='fp8'")
        check_ignored(module, self.ignore_modules, "Float8Precision")
        if isinstance(module, nn.Linear):
            raise make_error(
                ValueError,
                "precision='fp8': the module is a Linear layer itself, but only layers inside a module can be "
                "replaced.",
                fix="Wrap it: torch.nn.Sequential(layer).",
                argument="precision",
            )
        config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        # The number of rows is a side of the product for the gradients of weights. It depends on the user's batch, so
        # it may not be a multiple of 16.
        padded = {"pad_inner_dim": True} if self.recipe == "tensorwise" else {}
        config = dataclasses.replace(config, emulate=self.emulate, **padded)

        def convert(name: str, layer: nn.Module) -> nn.Module | None:
            if type(layer) is not nn.Linear or ignored(name, self.ignore_modules):
                return None
            if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
                return None
            converted: nn.Module = float8.convert_to_float8_training(nn.Sequential(layer), config=config)[0]
            return converted

        self._replaced += replace(module, convert)
        if not any(type(layer).__name__ == "Float8Linear" for layer in module.modules()):
            raise make_error(
                ValueError,
                f"precision='fp8': {type(module).__name__} has no Linear layer whose in_features and out_features are "
                f"multiples of {_MULTIPLE}, so nothing would compute in 8-bit floats.",
                fix="Use precision='bf16-mixed'.",
                argument="precision",
            )
        return module

    def teardown(self) -> None:
        """Restore the original layers."""
        put_back(self._replaced)


def check_float8(device: torch.device, precision: str = "fp8") -> None:
    """Check that a device multiplies 8-bit floats.

    Raises:
        ValueError: it does not; the message suggests the nearest precision.

    """
    instead = "Use precision='bf16-mixed'."
    if not is_cuda(device):
        raise make_error(
            ValueError,
            f"precision={precision!r}: {device.type.upper()} cannot multiply 8-bit floats; NVIDIA GPUs from Ada and "
            "Hopper on (compute capability 8.9) and AMD MI300 can.",
            fix=instead,
            argument="precision",
        )
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        arch = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
        if not arch.startswith(("gfx94", "gfx95", "gfx12")):
            raise make_error(
                ValueError,
                f"precision={precision!r}: {name} ({arch}) cannot multiply 8-bit floats; AMD MI300 can.",
                fix=instead,
                argument="precision",
            )
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        bf16 = "Use precision='16-mixed'." if major < 8 else instead
        raise make_error(
            ValueError,
            f"precision={precision!r}: {name} has the compute capability {major}.{minor} and cannot multiply 8-bit "
            "floats, which begin with 8.9 (Ada, Hopper).",
            fix=bf16,
            argument="precision",
        )
