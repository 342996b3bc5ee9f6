"""Speed-ups that are not arguments of the Trainer: attention dropout, threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hasten.machine.devices import number_of
from hasten.machine.host import usable_cores
from hasten.machine.launch import threads_for_each

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.types import Devices

_DROPOUTS = ("dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "attn_drop")


def attention_dropouts(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where attention probabilities are dropped: modules, and the names of their attributes.

    Example::

        >>> attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        >>> [name for _, name in attention_dropouts(attention)]
        ['dropout']

    """
    found = []
    for child in module.modules():
        for name in _DROPOUTS if "attention" in type(child).__name__.lower() else ():
            value = getattr(child, name, None)
            probability = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(probability, float) and 0.0 < probability < 1.0:
                found.append((child, name))
    return found


def no_attention_dropout(module: nn.Module) -> None:
    """Switch off the dropout of attention probabilities; other dropout stays. This changes what is trained.

    On the CPU and for long rows it forces an attention that keeps every probability.

    Example::

        >>> attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        >>> no_attention_dropout(attention)
        >>> attention.dropout
        0.0

    """
    for child, name in attention_dropouts(module):
        value = getattr(child, name)
        if isinstance(value, nn.Dropout):
            value.p = 0.0
        else:
            setattr(child, name, 0.0)


def switch_attention_dropout_off(trainer: Trainer, module: nn.Module) -> None:
    """``no_attention_dropout`` as a speed-up calls it."""
    no_attention_dropout(module)


# -- threads: in a small step they cost more than they save, and a container may have fewer cores than its machine


def processes_here(trainer: Trainer, devices: Devices | None) -> int:
    """Return how many processes a run with this argument starts on this machine; the trainer has its accelerator."""
    accelerator = trainer.strategy.accelerator
    return number_of(devices) or (1 if accelerator is None else accelerator.auto_device_count())


def use_threads_of(processes: int) -> Callable[[], None]:
    """Compute with the threads that each of so many processes will have; return a function that undoes it.

    Example::

        >>> before = torch.get_num_threads()
        >>> undo = use_threads_of(10_000)
        >>> torch.get_num_threads() in (1, before)  # It leaves a number that OMP_NUM_THREADS has set.
        True
        >>> undo()
        >>> torch.get_num_threads() == before
        True

    """
    threads = threads_for_each(processes) if processes > 1 else None
    return _set_threads(threads or torch.get_num_threads())


def one_thread(trainer: Trainer | None = None, module: LightningModule | None = None) -> Callable[[], None]:
    """Compute with one thread; return a function that undoes it."""
    return _set_threads(1)


def half_the_threads(trainer: Trainer | None = None, module: LightningModule | None = None) -> Callable[[], None]:
    """Compute with half as many threads; return a function that undoes it."""
    return _set_threads(max(1, torch.get_num_threads() // 2))


def a_thread_a_core(trainer: Trainer | None = None, module: LightningModule | None = None) -> Callable[[], None]:
    """Compute with as many threads as there are usable cores; return a function that undoes it.

    Example::

        >>> before = torch.get_num_threads()
        >>> undo = a_thread_a_core()
        >>> torch.get_num_threads() == usable_cores()
        True
        >>> undo()
        >>> torch.get_num_threads() == before
        True

    """
    return _set_threads(usable_cores())


def _set_threads(count: int) -> Callable[[], None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return functools.partial(torch.set_num_threads, before)
