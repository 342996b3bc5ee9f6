"""The random generator of an XLA device, which ``torch.manual_seed`` does not reach."""

from __future__ import annotations

import sys
from typing import Any

from hasten.seed import DeviceGenerator


class XLAGenerator(DeviceGenerator):
    """The generator of this process's XLA device."""

    name = "xla"

    def is_in_use(self) -> bool:
        """Return whether this process uses XLA devices already."""
        return runtime_started()

    def seed(self, seed: int) -> None:
        """Begin with this seed."""
        self.restore(seed)

    def state(self) -> int:
        """Return its state, a number."""
        state: int = _xla_model().get_rng_state(_device())
        return state

    def restore(self, state: int) -> None:
        """Go back to a state."""
        _xla_model().set_rng_state(state, _device())


def runtime_started() -> bool:
    """Return whether this process uses XLA devices already, so that its topology is fixed."""
    if "torch_xla" not in sys.modules:
        return False
    import torch_xla

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())


def _xla_model() -> Any:
    from torch_xla.core import xla_model

    return xla_model


def _device() -> str:
    import torch_xla

    return str(torch_xla.device())


# The generator of this process.
GENERATOR = XLAGenerator()
