"""ModelSummary and RichModelSummary: a table of the model's layers before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_info
from hasten.module.callback import Callback
from hasten.report.summary import LayerTable, check_depth, format_table, totals

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer


_NUMBERS = ("Params", "Params per Device", "FLOPs", "In sizes", "Out sizes")


class ModelSummary(Callback):
    """Log the layers of the model and their parameters when fit begins.

    Override ``summarize`` to write the table elsewhere.

    Args:
        max_depth: how many levels of nested modules to list; -1 for all, 0 for no table.
        **summarize_kwargs: passed on to ``summarize``.

    Raises:
        ValueError: ``max_depth`` is below -1 or not a whole number.

    Example::

        >>> ModelSummary(max_depth=2)._max_depth
        2

    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: object) -> None:
        self._max_depth = check_depth(max_depth)
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._max_depth == 0:
            return
        summary = self._summary(trainer, pl_module)
        if trainer.is_global_zero:
            self.summarize(
                summary.shown_columns(),
                summary.total_parameters,
                summary.trainable_parameters,
                summary.model_size,
                summary.total_training_modes,
                total_flops=summary.total_flops,
                **self._summarize_kwargs,
            )

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> LayerTable:
        """Return the table, for subclasses that show another one."""
        kind = trainer.strategy.sharding.layer_table(pl_module) or LayerTable
        return kind(pl_module, max_depth=self._max_depth)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: object,
    ) -> None:
        """Write the table.

        Args:
            summary_data: columns: heading and cells.
            total_parameters: number of parameters.
            trainable_parameters: those that require gradients.
            model_size: size of the parameters in MB.
            total_training_modes: number of modules in "train" and in "eval" mode.
            total_flops: floating-point operations of a forward pass; 0 if unknown.
            **summarize_kwargs: arguments of the constructor; unused here.

        """
        below = totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        rank_zero_info("%s", "\n" + format_table(summary_data, below))


class RichModelSummary(ModelSummary):
    """Print the layers of the model and their parameters with rich when fit begins.

    Args:
        max_depth: how many levels of nested modules to list; -1 for all, 0 for no table.
        **summarize_kwargs: ``header_style``, the style of the headings ("bold magenta").

    Raises:
        ModuleNotFoundError: rich is not installed.
        ValueError: ``max_depth`` is below -1 or not a whole number.

    Example::

        >>> RichModelSummary(max_depth=2)._max_depth
        2

    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: object) -> None:
        need("rich.table", purpose="RichModelSummary()")
        super().__init__(max_depth, **summarize_kwargs)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: object,
    ) -> None:
        """Draw the table; see ``ModelSummary.summarize`` for the arguments."""
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        style: Any = summarize_kwargs.get("header_style", "bold magenta")
        table = Table(header_style=style)
        for heading, _ in summary_data:
            table.add_column(
                heading,
                justify="right"
                if heading in ("Params", "Params per Device", "FLOPs", "In sizes", "Out sizes")
                else "left",
                style="dim" if heading == " " else None,
                no_wrap=heading == "Name",
            )
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            # As text: "[4, 8]" is a shape, not a style.
            table.add_row(*(Text(cell) for cell in row))
        console = get_console()
        console.print(table)
        grid = Table.grid()
        below = totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for number, what in below:
            grid.add_row(Text.assemble((what, "bold"), f": {number}"))
        console.print(grid)
