"""The layers of a model whose parameters are divided, as a table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hasten.report.summary import NOT_APPLICABLE, LayerTable, elements_of, human_readable


class DeepSpeedSummary(LayerTable):
    """The layers of a model whose parameters DeepSpeed's stage 3 has divided, with the part on each device.

    Args:
        model: a LightningModule, or any module.
        max_depth: how many levels of nested modules to list; -1 for all, 0 for none.

    Example::

        >>> from torch import nn
        >>> summary = DeepSpeedSummary(nn.Sequential(nn.Linear(4, 8)))
        >>> summary.parameters_per_layer  # Not divided: all of them.
        [40]

    """

    @property
    def parameters_per_layer(self) -> list[int]:
        """Number of parameters of each layer on one device."""
        return self.sum_by_layer(_on_device)

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table as columns: heading and cells."""
        columns = super().columns()
        names = [heading for heading, _ in columns]
        cells = list(map(human_readable, self.parameters_per_layer))
        cells += [NOT_APPLICABLE] * (len(columns[0][1]) - len(cells))
        columns.insert(names.index("Params") + 1, ("Params per Device", cells))
        return columns


def _on_device(parameter: Tensor) -> int:
    partition: Any = getattr(parameter, "partition_numel", None)
    return elements_of(parameter) if partition is None else partition()
