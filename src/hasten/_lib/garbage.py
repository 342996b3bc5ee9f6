"""Python's garbage collector around a training: started by hand only where much memory may come of it.

A full pass looks at every object of the program: 100 to 250 ms once torch and its like are imported, which is longer
than a short training takes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

# Parameters of this size are worth a full pass: their gradients and the optimizer's state may come back with them.
_LARGE_BYTES = 100_000_000

_trained: list[weakref.ref[nn.Module]] = []
_frozen = False


@contextmanager
def full_passes_once() -> Iterator[None]:
    """Let the collector go over everything once at most while the context is open, when it does so by itself.

    What survived that pass is left out of the later ones, which would only repeat it, until the context closes.
    """
    if _after_pass in gc.callbacks or gc.get_freeze_count() > 0:
        # Within another training, or the program has frozen its objects itself.
        yield
        return
    gc.callbacks.append(_after_pass)
    try:
        yield
    finally:
        gc.callbacks.remove(_after_pass)
        _thaw()


def collect_all() -> None:
    """Collect all garbage, also among what passes within a training leave out."""
    _thaw()
    gc.collect()


def collect_earlier_models(module: nn.Module) -> None:
    """Collect garbage before ``module`` is trained if models trained before it may hold much memory.

    A module and its Trainer refer to each other: when a search or a cross-validation drops them for the next ones,
    they stay in memory until a full pass.
    """
    size_bytes = sum(_size_bytes(ref(), unless=module) for ref in _trained)
    _trained[:] = [weakref.ref(module)]
    if size_bytes >= _LARGE_BYTES:
        collect_all()


def _size_bytes(module: nn.Module | None, *, unless: nn.Module) -> int:
    """Return the size of the parameters; 0 for a module that is gone or is ``unless``."""
    if module is None or module is unless:
        return 0
    return sum(p.numel() * p.element_size() for p in module.parameters() if not is_lazy(p))


def _after_pass(phase: str, info: dict[str, int]) -> None:
    global _frozen
    if phase == "stop" and info["generation"] == 2 and not _frozen:
        gc.freeze()
        _frozen = True


def _thaw() -> None:
    global _frozen
    if _frozen:
        _frozen = False
        gc.unfreeze()
