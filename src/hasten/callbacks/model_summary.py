"""ModelSummary: a table of the model's layers before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_info
from hasten.module.callback import Callback
from hasten.report.summary import ModelSummary as Summary
from hasten.report.summary import check_depth, format_table

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class ModelSummary(Callback):
    """Say which layers the model has, and how many parameters, when fit begins.

    Override ``summarize`` to write the table elsewhere.

    Args:
        max_depth: how many levels of nested modules to list; -1 for all, 0 for no table.
        **summarize_kwargs: passed on to ``summarize``.

    Raises:
        ValueError: ``max_depth`` is something else.

    Example::

        >>> ModelSummary(max_depth=2)._max_depth
        2

    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        self._max_depth = check_depth(max_depth)
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table, on the first process."""
        if self._max_depth == 0:
            return
        summary = Summary(pl_module, max_depth=self._max_depth)
        if trainer.is_global_zero:
            self.summarize(
                summary.columns(),
                summary.total_parameters,
                summary.trainable_parameters,
                summary.model_size,
                summary.total_training_modes,
                total_flops=summary.total_flops,
                **self._summarize_kwargs,
            )

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: Any,
    ) -> None:
        """Write the table.

        Args:
            summary_data: columns: heading and cells.
            total_parameters: number of parameters.
            trainable_parameters: those that require gradients.
            model_size: size of the parameters in MB.
            total_training_modes: number of modules in "train" and in "eval" mode.
            total_flops: floating-point operations of a forward; 0 where it is not known.
            **summarize_kwargs: what the constructor was given; unused here.

        """
        table = format_table(
            summary_data,
            total_parameters,
            trainable_parameters,
            model_size,
            total_training_modes,
            total_flops,
        )
        rank_zero_info("%s", "\n" + table)
