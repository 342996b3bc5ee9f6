"""RichModelSummary: the table of layers, drawn with rich."""

from __future__ import annotations

from typing import Any

from hasten._lib.optional import need
from hasten.callbacks.model_summary import ModelSummary
from hasten.report.summary import totals


class RichModelSummary(ModelSummary):
    """Say which layers the model has, and how many parameters, as a table drawn with rich.

    Args:
        max_depth: how many levels of nested modules to list; -1 for all, 0 for no table.
        **summarize_kwargs: ``header_style``, the style of the headings ("bold magenta").

    Raises:
        ModuleNotFoundError: rich is not installed.
        ValueError: ``max_depth`` is out of range.

    Example::

        >>> RichModelSummary(max_depth=2)._max_depth
        2

    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        need("rich", purpose="RichModelSummary()")
        super().__init__(max_depth, **summarize_kwargs)

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
        """Draw the table.

        Args:
            summary_data: columns: heading and cells.
            total_parameters: number of parameters.
            trainable_parameters: those that require gradients.
            model_size: size of the parameters in MB.
            total_training_modes: number of modules in "train" and in "eval" mode.
            total_flops: floating-point operations of a forward; 0 where it is not known.
            **summarize_kwargs: ``header_style``.

        """
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        to_the_right = ("Params", "FLOPs", "In sizes", "Out sizes")
        for heading, _ in summary_data:
            table.add_column(
                heading,
                justify="right" if heading in to_the_right else "left",
                style="dim" if heading == " " else None,
                no_wrap=heading == "Name",
            )
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            # As text: "[4, 8]" is a shape, and not a style.
            table.add_row(*(Text(cell) for cell in row))
        console = get_console()
        console.print(table)
        for number, what in totals(
            total_parameters, trainable_parameters, model_size, total_training_modes, total_flops
        ):
            console.print(Text.assemble((what, "bold"), f": {number}"))
