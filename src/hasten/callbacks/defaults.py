"""The callbacks a Trainer adds by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.callbacks.checkpoint import Checkpoint

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.module.callback import Callback


def with_defaults(arguments: Arguments) -> list[Callback]:
    """Return the user's callbacks and those that the arguments ask for.

    Raises:
        ValueError: a callback is given whose argument switches it off.

    """
    from hasten.callbacks.model_checkpoint import ModelCheckpoint
    from hasten.callbacks.model_summary import ModelSummary
    from hasten.callbacks.progress import ProgressBar, TQDMProgressBar
    from hasten.callbacks.timer import Timer

    callbacks: list[Callback] = list(arguments.callbacks)

    def given(kind: type) -> list[str]:
        return [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]

    bars = given(ProgressBar)
    if len(bars) > 1:
        raise ValueError(f"Trainer(callbacks=[...]): there can be one progress bar, got {bars}.")
    if bars and not arguments.enable_progress_bar:
        _contradiction("enable_progress_bar", bars[0])
    if given(Checkpoint) and not arguments.enable_checkpointing and not arguments.fast_dev_run:
        _contradiction("enable_checkpointing", given(Checkpoint)[0])
    if arguments.enable_progress_bar and not bars:
        callbacks.append(TQDMProgressBar())
    if arguments.enable_model_summary and not given(ModelSummary):
        if "RichProgressBar" in [kind.__name__ for bar in callbacks for kind in type(bar).__mro__]:
            from hasten.callbacks.rich_summary import RichModelSummary

            callbacks.append(RichModelSummary())
        else:
            callbacks.append(ModelSummary())
    if arguments.max_time is not None and not given(Timer):
        callbacks.append(Timer(arguments.max_time))
    if arguments.enable_checkpointing and not given(Checkpoint):
        callbacks.append(ModelCheckpoint())
    return callbacks


def _contradiction(argument: str, callback: str) -> None:
    raise ValueError(
        f"Trainer({argument}=False, callbacks=[{callback}(...)]): one switches off what the other asks for. "
        "Leave out one of them."
    )
