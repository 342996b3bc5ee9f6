"""The random generator of an XLA device, which ``torch.manual_seed`` does not reach."""

from __future__ import annotations


class XLAGenerator:
    """The generator of this process's XLA device."""

    def seed(self, seed: int) -> None:
        """Begin with this seed."""
        self.restore(seed)

    def state(self) -> int:
        """Return its state, a number."""
        import torch_xla
        from torch_xla.core import xla_model

        return int(xla_model.get_rng_state(str(torch_xla.device())))

    def restore(self, state: int) -> None:
        """Go back to a state."""
        import torch_xla
        from torch_xla.core import xla_model

        xla_model.set_rng_state(state, str(torch_xla.device()))
