"""The callbacks that a Trainer adds by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.callbacks.checkpoint import Checkpoint, ModelCheckpoint

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.module.callback import Callback


def with_defaults(arguments: Arguments) -> list[Callback]:
    """Return the user's callbacks and the default ones that the arguments enable.

    Raises:
        ValueError: a callback is given whose argument disables it.

    """
    from hasten.callbacks.model_summary import ModelSummary, RichModelSummary
    from hasten.callbacks.progress import ProgressBar
    from hasten.callbacks.timer import Timer
    from hasten.callbacks.tqdm_progress import TQDMProgressBar

    callbacks: list[Callback] = list(arguments.callbacks)

    def names_of(kind: type) -> list[str]:
        return [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]

    bars = names_of(ProgressBar)
    if len(bars) > 1:
        raise ValueError(f"Trainer(callbacks=[...]): there can be one progress bar, got {bars}.")
    if bars and not arguments.enable_progress_bar:
        _contradiction("enable_progress_bar", bars[0])
    if names_of(Checkpoint) and not arguments.enable_checkpointing and not arguments.fast_dev_run:
        _contradiction("enable_checkpointing", names_of(Checkpoint)[0])
    if arguments.enable_progress_bar and not bars:
        callbacks.append(TQDMProgressBar())
    if arguments.enable_model_summary and not names_of(ModelSummary):
        is_rich = any(kind.__name__ == "RichProgressBar" for bar in callbacks for kind in type(bar).__mro__)
        callbacks.append(RichModelSummary() if is_rich else ModelSummary())
    if arguments.max_time is not None and not names_of(Timer):
        callbacks.append(Timer(arguments.max_time))
    if arguments.enable_checkpointing and not names_of(Checkpoint):
        callbacks.append(ModelCheckpoint())
    return callbacks


def _contradiction(argument: str, callback: str) -> None:
    raise ValueError(
        f"Trainer({argument}=False, callbacks=[{callback}(...)]): they contradict each other. "
        "Leave out one of them."
    )
