"""Matrix products in 8-bit floats, through torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from hasten._lib import check
from hasten._lib.device import is_cuda
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten.precision.builtin import MixedPrecision
from hasten.precision.layers import check_ignored, check_names, ignored

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Sides of matrices must be multiples of this for 8-bit products.
_MULTIPLE = 16


class Float8Precision(MixedPrecision):
    """Linear layers multiply in 8-bit floats, everything else computes as with "bf16-mixed"; weights stay in 32 bits.

    It is faster for wide layers (a few thousand features) together with ``compile``, which fuses the conversions with
    the operations before them. Layers whose sides are not multiples of 16 in each process do not change. The layers
    are the same objects, so parameters, hooks and names in ``state_dict`` stay; after the run they compute as before.

    Strategies that divide the model take it, too. Shards are gathered in bfloat16 and rounded afterwards. Where layers
    are split, the scale of a tensor is that of all its parts. "tensorwise" scales the activations of each process, and
    of each micro-batch, by themselves.

    Args:
        recipe: "tensorwise", one scale per tensor (fastest); "rowwise", one per row (more exact);
            "rowwise_with_gw_hp", also with gradients of weights in bfloat16 (most exact).
        ignore_modules: names of modules that stay in bfloat16 with all their layers, for example {"lm_head"}.
        emulate: round to 8-bit floats and multiply in 32 bits, and gather shards in 32 bits. Slow; for trying a model
            on any device.

    Raises:
        ValueError: the recipe does not exist, the device has no 8-bit floats, or no layer can be converted.
        ModuleNotFoundError: torchao is not installed.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; `torchao.float8
    <https://docs.pytorch.org/ao/stable/api_reference/api_ref_float8.html>`_.

    """

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
        self.param_dtype = None if emulate else torch.bfloat16
        # The layers that have changed, their classes before, and the names of the attributes that they have got.
        self._changed: list[tuple[Any, type, Iterable[str]]] = []

    def check_device(self, device: torch.device) -> None:
        """Check that the device multiplies 8-bit floats."""
        if not self.emulate:
            check_float8(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module``, whose linear layers multiply in 8-bit floats until ``teardown``."""
        float8 = need("torchao.float8", purpose="precision='fp8'")
        check_ignored(module, self.ignore_modules, "Float8Precision")
        config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        # The number of rows is a side of the product for the gradients of weights. It depends on the user's batch, so
        # it may not be a multiple of 16.
        padded = {"pad_inner_dim": True} if self.recipe == "tensorwise" else {}
        config = dataclasses.replace(config, emulate=self.emulate, **padded)
        plain = nn.Linear(_MULTIPLE, _MULTIPLE, device="meta")
        example = float8.convert_to_float8_training(plain, config=config)
        added = {name: value for name, value in vars(example).items() if name not in vars(plain)}
        for name, layer in module.named_modules():
            kind = _class_in_8_bits(type(layer), type(example))
            if kind is None or ignored(name, self.ignore_modules) or any(side % _MULTIPLE for side in _sides(layer)):
                continue
            # In place: what gathers or splits the layer, and hooks of the program, refer to this object.
            self._changed.append((layer, type(layer), added.keys()))
            layer.__class__ = kind
            vars(layer).update(added)
        if not any(isinstance(layer, type(example)) for layer in module.modules()):
            what = (
                f"precision='fp8': {type(module).__name__} has no Linear layer whose in_features and out_features are "
                f"multiples of {_MULTIPLE} in each process, so nothing would compute in 8-bit floats."
            )
            raise make_error(ValueError, what, fix="Use precision='bf16-mixed'.", argument="precision")
        return module

    def teardown(self) -> None:
        """Let the layers compute as before."""
        while self._changed:
            layer, kind, added = self._changed.pop()
            layer.__class__ = kind
            for name in added:
                vars(layer).pop(name, None)


def _class_in_8_bits(kind: type, linear: type) -> type | None:
    """Return the class that a layer gets: ``linear`` for ``nn.Linear``, also below ``fully_shard``; None for others."""
    if kind is nn.Linear:
        return linear
    if kind.__bases__[1:] != (nn.Linear,):
        return None
    from torch.distributed.fsdp import FSDPModule

    # ``fully_shard`` replaces the class of each layer that it gathers separately.
    is_gathered = kind.__bases__[0] is FSDPModule
    return type(linear.__name__, (FSDPModule, linear), dict(vars(kind))) if is_gathered else None


def _sides(layer: Any) -> list[int]:
    """Return the sides of the matrix with which this process multiplies; of a split layer, those of its part."""
    weight, sides = layer.weight, list(layer.weight.shape)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is not None:
        for axis, size, place in zip(mesh.mesh_dim_names or (), mesh.shape, weight.placements, strict=False):
            # Along the other axes, the parts are gathered before they are used.
            if axis == "tensor_parallel" and place.is_shard():
                sides[place.dim] //= size
    return sides


def check_float8(device: torch.device, precision: str = "fp8") -> None:
    """Check that a device multiplies 8-bit floats."""
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
            what = f"precision={precision!r}: {name} ({arch}) cannot multiply 8-bit floats; AMD MI300 can."
            raise make_error(ValueError, what, fix=instead, argument="precision")
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
