"""``trainer._results`` under Lightning's names: what was logged in the running stage, and with which options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.logged_values import LoggedValues


@dataclass(frozen=True)
class Sync:
    """Whether a value is reduced over the processes."""

    should: bool


@dataclass(frozen=True)
class Metadata:
    """The name of a value, the hook that has logged it, and its options."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    sync: Sync


@dataclass(frozen=True)
class ResultMetric:
    """A value that was logged; ``is_tensor`` is False for a metric of torchmetrics."""

    meta: Metadata
    is_tensor: bool


class Results:
    """The values of a stage.

    Args:
        logged: of the run.

    """

    # The ending of their names where there are several loaders.
    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged

    @property
    def result_metrics(self) -> list[ResultMetric]:
        """What was logged, by hook and name."""
        return [
            ResultMetric(
                Metadata(
                    each.row.name,
                    each.name,
                    each.prog_bar,
                    each.logger,
                    each.on_step,
                    each.on_epoch,
                    Sync(each.options is not None and each.options.sync_dist),
                ),
                is_tensor=each.metric is None,
            )
            for each in self._logged.all_values()
        ]
