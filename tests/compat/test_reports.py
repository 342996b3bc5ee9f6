"""What a run reports under Lightning's names: profilers, progress bars, summaries."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import schedule

import hasten_lightning
from tests.models import Classifier, loader, quiet
from tests.refusals import warned


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_messages_are_found_under_the_loggers_of_lightning() -> None:
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        assert logging.getLogger(name) is logging.getLogger("hasten")
    assert logging.getLogger("lightning.pytorch.callbacks").parent is logging.getLogger("hasten")
    hasten_lightning.uninstall()
    assert logging.getLogger("lightning.pytorch").name == "lightning.pytorch"


def test_a_profiler_logs_its_report() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        quiet(profiler="simple", limit_train_batches=1, limit_val_batches=1).fit(Classifier(), loader(), loader())
    finally:
        logger.removeHandler(handler)
    (report,) = [record.getMessage() for record in records if "Profiler Report" in record.getMessage()]
    assert "|  [Strategy]SingleDeviceStrategy.training_step" in report


def test_names_of_the_pytorch_profiler() -> None:
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.profilers.pytorch import _KINETO_AVAILABLE, ScheduleWrapper

    assert torch.profiler.kineto_available() is _KINETO_AVAILABLE
    with warned(UserWarning, says=("record_shape=", "'record_shapes'")):
        PyTorchProfiler(record_shape=True)
    wrapper = ScheduleWrapper(schedule(wait=1, warmup=1, active=2))
    wrapper.setup("[LightningModule]Net.on_fit_start")

    def after(step: str) -> str:
        wrapper.pre_step(f"[Strategy]SingleDeviceStrategy.{step}")
        action: str = wrapper(0).name
        return action

    # The sanity check does not count; each kind of step has a cycle of its own.
    steps = ["validation_step", "training_step", "training_step", "validation_step", "training_step", "training_step"]
    assert [after(step) for step in steps] == ["NONE", "WARMUP", "RECORD", "RECORD", "RECORD_AND_SAVE", "NONE"]
    assert (wrapper.is_training, wrapper.num_step, wrapper.has_finished) == (True, 3, True)


def test_a_summary_by_a_subclass() -> None:
    from lightning.pytorch.callbacks import ModelSummary
    from lightning.pytorch.utilities.model_summary import ModelSummary as Table

    seen: list[dict[str, list[str]]] = []

    class Short(Table):
        def _get_summary_data(self) -> list[tuple[str, list[str]]]:
            return super()._get_summary_data()[:3]

    class Mine(ModelSummary):
        def _summary(self, trainer: object, pl_module: torch.nn.Module) -> Table:
            return Short(pl_module, max_depth=self._max_depth)

        @staticmethod
        def summarize(summary_data: list[tuple[str, list[str]]], *args: object, **kwargs: object) -> None:
            seen.append(dict(summary_data))

    quiet(callbacks=[Mine()], enable_model_summary=True, limit_train_batches=1).fit(Classifier(), loader())
    assert [list(data) for data in seen] == [[" ", "Name", "Type"]]
    # Lightning's columns, with or without an example.
    assert [name for name, _ in Table(Classifier())._get_summary_data()][3:] == ["Params", "Mode", "FLOPs"]
    lazy = Table(torch.nn.Sequential(torch.nn.LazyLinear(2)))
    with pytest.warns(UserWarning, match="total number of parameters detected may be inaccurate"):
        assert lazy.total_parameters == 0


def test_a_progress_bar_counts_and_its_class_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.callbacks.progress import tqdm_progress

    import hasten.callbacks.progress as ours

    original = tqdm_progress.Tqdm

    class Counts(original):  # type: ignore[misc, valid-type]
        """Keeps each count it was given."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "n":
                self.__dict__.setdefault("counts", []).append(value)
            super().__setattr__(name, value)

    monkeypatch.setattr("lightning.pytorch.callbacks.progress.tqdm_progress.Tqdm", Counts)
    bar = TQDMProgressBar(refresh_rate=2)
    options = {"enable_progress_bar": True, "limit_train_batches": 5, "limit_val_batches": 2}
    quiet(callbacks=[bar], **options).fit(Classifier(), loader(), loader())
    assert type(bar.train_progress_bar) is Counts
    assert list(dict.fromkeys(bar.train_progress_bar.counts)) == [0, 2, 4, 5]
    # It can still be read when validation is over.
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (2, 2)
    monkeypatch.undo()
    assert ours.Tqdm is tqdm_progress.Tqdm is original
    tqdm_progress.Tqdm = Counts
    hasten_lightning.uninstall()
    assert ours.Tqdm is original


def test_the_rates_of_training_are_logged_with_the_epoch() -> None:
    from lightning.pytorch.callbacks import ThroughputMonitor

    from tests.fakes import RowLogger

    rows = RowLogger()
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 1, window_size=2, separator="/")
    options = {"logger": rows, "log_every_n_steps": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    quiet(callbacks=[monitor], **options).fit(Classifier(), loader())
    measured = [row for _, row in rows.rows if "train/batches" in row]
    assert [(row["train/batches"], row["epoch"]) for row in measured] == [(1, 0), (2, 0)]
