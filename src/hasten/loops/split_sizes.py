"""Micro-batches: batches of the size asked for, whatever the loader's are, computed a few samples at a time.

The loop side, which splits a batch and begins a step again, is ``loops/micro_batches.py``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_debug
from hasten._lib.split import Fields
from hasten.batching.sample_fields import fields_of
from hasten.data.loader_parts import with_attributes
from hasten.loops.states import TrainerFn
from hasten.memory import nothing_repeated, recomputed, repeated_blocks

if TYPE_CHECKING:
    from hasten.loops.retry import Seen
    from hasten.loops.run import Run
    from hasten.loops.run_data import Source


def rebatched(loader: Any, batch_size: int, *, name: str = "the train dataloader") -> Any:
    """Return a loader with the same samples in the same order, in batches of ``batch_size``.

    Args:
        loader: a ``DataLoader``; it is not changed. Sampler, collate function and workers are kept.
        batch_size: samples of a batch; the last one may have fewer, unless the loader drops it.
        name: what to call the loader in messages.

    Raises:
        MisconfigurationException: something else than the loader decides how large its batches are.

    Example::

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> [batch[0].tolist() for batch in rebatched(loader, 3)]
        [[0, 1, 2], [3, 4]]

    """
    check_rebatched(loader, batch_size, name=name)
    batches: Any = loader.batch_sampler
    if batches.batch_size == batch_size:
        return loader
    return with_attributes(
        loader,
        batch_size=batch_size,
        batch_sampler=BatchSampler(batches.sampler, batch_size, batches.drop_last),
    )


def check_rebatched(loader: Any, batch_size: int | str, *, name: str) -> None:
    """Check that a loader's batches can have another size.

    Raises:
        MisconfigurationException: something else than the loader decides how large its batches are.

    """
    if not isinstance(loader, DataLoader):
        raise MisconfigurationException(
            f"Trainer(batch_size={batch_size!r}): {name} is a {type(loader).__name__}, which makes its batches itself. "
            "Give a DataLoader, or leave batch_size out; micro_batch alone splits the batches that come."
        )
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "batch_size=None" if batches is None else f"the batch sampler {type(batches).__name__}"
        raise MisconfigurationException(
            f"Trainer(batch_size={batch_size!r}): {name} has {what}, which decides what a batch is. Set the size there "
            "and leave batch_size out; micro_batch alone splits the batches that come."
        )


def change_module(run: Run) -> None:
    """Check that micro-batches and recomputing can be had in this run, and recompute where it was asked for.

    Raises:
        MisconfigurationException: they cannot; the message says why and what can.
        ValueError: there is nothing to recompute.

    """
    speed, module = run.arguments.speed, run.module
    asked = [
        f"{name}={value!r}"
        for name, value in (("micro_batch", speed.micro_batch), ("memory", speed.memory))
        if value is not None
    ]
    if not asked or run.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization and (speed.micro_batch is not None or speed.memory == "auto"):
        raise MisconfigurationException(
            f"Trainer({asked[0]}): {type(module).__name__} steps its optimizers itself (manual optimisation), so a "
            "step cannot be split or begun again from outside. Split the batch in training_step and call "
            "manual_backward for each part, or use automatic optimisation."
        )
    if run.runtime.world_size > 1 and "auto" in (speed.micro_batch, speed.memory):
        _check_processes(run, asked[0])
    if speed.memory in ("selective", "full"):
        run.undo.enter_context(recomputed(module, speed.memory))
    if speed.memory == "auto":
        rank_zero_debug("Trainer(memory='auto'): nothing is computed twice until memory runs out.")
    run.fits = Fit(run)


def _check_processes(run: Run, asked: str) -> None:
    """Refuse where one process that runs out of memory leaves the others waiting inside a forward."""
    if any(isinstance(child, nn.SyncBatchNorm) for child in run.module.modules()):
        raise MisconfigurationException(
            f"Trainer({asked}) with SyncBatchNorm on {run.runtime.world_size} processes: its forward waits for the "
            "other processes, and one that runs out of memory would never come. Give micro_batch a number, or use "
            "sync_batchnorm=False."
        )
    strategy = run.runtime.strategy
    if not strategy.computes_alone:
        raise MisconfigurationException(
            f"Trainer({asked}): with strategy={strategy.name!r} the processes exchange parts of the model inside a "
            "forward, and one that runs out of memory would leave the others waiting. Give micro_batch a number, "
            "and memory='selective' or 'full'."
        )


class Fit:
    """What was found to fit into memory: how many samples are computed at once, and what is computed twice.

    It only ever gets smaller, and is kept in checkpoints.

    Args:
        run: whose module and arguments these are.

    """

    def __init__(self, run: Run) -> None:
        speed = run.arguments.speed
        self._module = run.module
        self._recomputed = run.undo.enter_context(ExitStack())
        self.shrinks = speed.micro_batch == "auto"
        self.recomputes = speed.memory == "auto"
        # None for the whole batch.
        self.samples: int | None = speed.micro_batch if isinstance(speed.micro_batch, int) else None
        self.memory: str | None = None
        self._blocks = 0
        self._shared = speed.shared_fields
        # Of the loaders read last.
        self._fields: tuple[list[Any], Fields | None] | None = None
        # What a step changes beside the weights; see loops/retry.py.
        self.seen: Seen | None = None

    def fields_of(self, source: Source, changed_later: bool) -> Fields | None:
        """Return which fields of the batches run over samples: as the user said, or as the data shows.

        Args:
            source: the training data.
            changed_later: whether hooks may change a batch before it is computed.

        """
        if self._shared is not None:
            return Fields(all_over=True, shared_names=self._shared)
        loaders = source.streams()
        known = self._fields
        if known is None or [id(loader) for loader in known[0]] != [id(loader) for loader in loaders]:
            known = self._fields = loaders, fields_of(source.loaders[0], changed_later=changed_later)
        return known[1]

    @property
    def may_fail(self) -> bool:
        """Whether a step is begun again where memory runs out."""
        return self.shrinks or self.recomputes

    def make_smaller(self, attempted: int, *, keep_less: bool = False) -> bool:
        """Need less memory than the attempt that failed; return whether there was something left to try.

        Cheapest first: keep fewer activations, but all that is dear to compute; halve the samples, which costs
        nothing as long as they fill the device; compute everything twice.

        Args:
            attempted: samples computed at once.
            keep_less: what is kept was changed in place, so it cannot be kept.

        """
        if self.recomputes and self.memory is None and repeated_blocks(self._module):
            self._recompute("selective")
        elif self.memory == "selective" and keep_less:
            self._recompute("full")
        elif self.shrinks and attempted > 1:
            self.samples = attempted // 2
        elif self.memory == "selective":
            self._recompute("full")
        else:
            return False
        return True

    def _recompute(self, how: str) -> None:
        self._recomputed.close()
        self._blocks = self._recomputed.enter_context(recomputed(self._module, how))
        self.memory = how

    def describe(self) -> str:
        """Say in words what is computed now."""
        said = []
        if self.shrinks and self.samples is not None:
            said.append(
                f"{self.samples} sample{'s' if self.samples > 1 else ''} at once (micro_batch='auto')"
            )
        if self.memory is not None:
            kept = "all but products and attention" if self.memory == "selective" else "everything"
            said.append(f"{self._blocks} blocks compute {kept} again in backward (memory='auto')")
        return ", ".join(said)

    def advice(self) -> str:
        """Say what else would help where nothing is left to try."""
        if not self.shrinks:
            return "Add micro_batch='auto', which computes fewer samples at once."
        if not self.recomputes:
            return "Add memory='auto', which keeps fewer activations."
        if self.memory is None:
            return nothing_repeated(self._module).partition(" Use micro_batch")[0]
        return "Use a smaller model, shorter samples, a precision of fewer bytes, or more devices."

    def state_dict(self) -> dict[str, Any]:
        """Return what was found."""
        return {"samples": self.samples, "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was found before; a size that is asked for now stays."""
        if self.shrinks and state["samples"] is not None:
            self.samples = state["samples"]
        if self.recomputes and state["memory"] is not None and state["memory"] != self.memory:
            self._recompute(state["memory"])
