"""Spike detection: a run ends where the loss jumps, and the batches to leave out are written down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten.callbacks import SpikeDetection
from hasten.callbacks.spike import TrainingSpikeException
from tests.callbacks.resuming import SaveAt
from tests.callbacks.scripted import run_program
from tests.models import quiet

NAN, INF = math.nan, math.inf


class Told(L.LightningModule):
    """Its losses are those it is given."""

    def __init__(self, losses: list[float | None], weight: float | None = None) -> None:
        super().__init__()
        self.losses, self.loss_weight = losses, weight
        self.parameter = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.losses[self.trainer.total_batch_idx + 1]
        if value is None:
            return None
        loss = self.parameter * 0.0 + value
        if self.loss_weight is not None:
            return {"loss": loss, "loss_weight": torch.tensor(self.loss_weight * (1 + batch_idx % 2))}
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def spiked(losses: list[float | None], folder: Path, /, *, an_epoch: int = 100, **options: Any) -> int | None:
    """Return the batch at which the run ended, or None."""
    more = options.pop("trainer", {})
    module = Told(losses, options.pop("weight", None))
    batches = [torch.zeros(1)] * min(an_epoch, len(losses))
    trainer = quiet(
        callbacks=[SpikeDetection(exclude_batches_path=folder, **options)],
        max_epochs=-(-len(losses) // an_epoch),
        **more,
    )
    try:
        trainer.fit(module, batches)
    except TrainingSpikeException as error:
        return error.batch_idx
    return None


STEADY: list[float | None] = [1.0, 1.1, 0.9, 1.0]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        # Worse than before, and twice the mean away from the mean (the default), or not.
        ([*STEADY, 3.01, 1.0], {}, 4),
        ([*STEADY, 2.9, 1.0], {}, None),
        ([*STEADY, 1.6], {"rtol": 0.5}, 4),
        ([*STEADY, 1.4], {"rtol": 0.5}, None),
        # Both tolerances must be passed.
        ([*STEADY, 3.5], {"atol": 3.0}, None),
        ([*STEADY, 4.5], {"atol": 3.0}, 4),
        ([*STEADY, 1.5], {"atol": 0.4, "rtol": None}, 4),
        ([*STEADY, 1.3], {"atol": 0.4, "rtol": None}, None),
        ([2.0, 1.0, 1.0, 1.001], {"rtol": None}, 3),
        ([2.0, 1.5, 1.0, 0.5, 0.5], {"rtol": None}, None),
        # Exactly at the tolerance counts.
        ([1.0, 1.0, 3.0], {}, 2),
        ([1.0, 1.0, 2.0], {"atol": 1.0, "rtol": None}, 2),
        # Better is never a spike, in either direction of the mode.
        ([9.0, 9.0, 1.0], {"rtol": 0.1}, None),
        ([9.0, 9.0, 1.0], {"rtol": 0.1, "mode": "max"}, 2),
        ([1.0, 1.0, 9.0], {"mode": "max"}, None),
        ([-1.0, -1.0, -5.0], {"mode": "max"}, 2),
        ([-5.0, -5.0, 9.0], {}, 2),
        # The mean forgets what left the window.
        ([100.0, 1.0, 1.0, 5.0], {"window": 2}, 3),
        ([100.0, 1.0, 1.0, 5.0], {"window": 3}, None),
        # Warming up.
        ([1.0, 50.0], {}, 1),
        ([1.0, 50.0], {"warmup": 2}, None),
        ([1.0, 50.0, 300.0], {"warmup": 2}, 2),
        ([NAN, 1.0], {"warmup": 0}, 0),
        ([5.0, 1.0], {"warmup": 0}, None),
        ([NAN, 1.0, 1.0, 9.0], {}, 3),
        # Not finite.
        ([1.0, NAN], {}, 1),
        ([1.0, -INF], {}, 1),
        ([1.0, NAN, 1.0, 9.0], {"finite_only": False}, 3),
        ([1.0, INF], {"finite_only": False}, 1),
        ([1.0, -INF, 1.0], {"finite_only": False}, None),
        ([1.0, -INF], {"finite_only": False, "mode": "max"}, 1),
        # A step that returned nothing.
        ([1.0, None, 1.0, 9.0], {}, 3),
        ([None, None, 1.0], {"warmup": 0}, None),
    ],
)
def test_what_is_a_spike(
    tmp_path: Path, losses: list[float | None], options: dict[str, Any], expected: int | None
) -> None:
    assert spiked(losses, tmp_path, **options) == expected
    path = tmp_path / "skip_batches.json"
    assert path.exists() == (expected is not None)
    if expected is not None:
        assert json.loads(path.read_text()) == [index for index in (expected - 1, expected) if index >= 0]


def test_batches_count_over_epochs_and_are_named_by_epoch(tmp_path: Path) -> None:
    assert spiked([1.0, 1.0, 9.0], tmp_path, an_epoch=2) == 0
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [0]


def test_accumulation_and_weights_do_not_make_spikes(tmp_path: Path) -> None:
    losses: list[float | None] = [1.0] * 7
    accumulate = {"accumulate_grad_batches": 4}
    assert spiked(losses, tmp_path, rtol=0.1, trainer=accumulate) is None
    assert spiked(losses, tmp_path, rtol=0.1, weight=3.0) is None
    assert spiked(losses, tmp_path, rtol=0.1, weight=3.0, trainer=accumulate) is None
    assert spiked(losses, tmp_path, rtol=0.1, weight=0.0, trainer=accumulate) is None
    assert spiked([*losses[:-1], 1.2], tmp_path, rtol=0.1, trainer=accumulate) == 6
    assert spiked([1.0, 1.0, 1.2, 1.0], tmp_path, rtol=0.1, trainer=accumulate) == 2


def test_the_file_and_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        (tmp_path / "a" / "bad.json", tmp_path / "a" / "bad.json"),
        (str(tmp_path / "b"), tmp_path / "b" / "skip_batches.json"),
        (None, tmp_path / "root" / "skip_batches.json"),
    ):
        callback = SpikeDetection(exclude_batches_path=given)
        callback.bad_batches = [1]  # Once in the list is enough.
        trainer = quiet(callbacks=[callback], default_root_dir=tmp_path / "root")
        with pytest.raises(
            TrainingSpikeException, match=r"jumped in batch 2 of epoch 0\..*batches \[1, 2\]"
        ) as caught:
            trainer.fit(Told([1.0, 1.0, 9.0]), [torch.zeros(1)] * 3)
        assert str(expected) in str(caught.value)
        assert json.loads(expected.read_text()) == [1, 2]
        assert callback.bad_batches == [1, 2]
    assert str(TrainingSpikeException(3)) == "The loss jumped in batch 3 of the epoch."
    assert issubclass(TrainingSpikeException, RuntimeError)


def test_a_resumed_run_compares_with_the_losses_before(tmp_path: Path) -> None:
    losses: list[float | None] = [1.0, 5.0, 1.0, 1.0, 3.25, 1.0]
    saver = SaveAt(tmp_path / "a.ckpt", 4)

    def fit(*more: L.Callback, ckpt_path: Path | None = None, **options: Any) -> SpikeDetection:
        callback = SpikeDetection(exclude_batches_path=tmp_path, **options)
        trainer = quiet(callbacks=[callback, *more])
        trainer.fit(Told(losses), [torch.zeros(1)] * 6, ckpt_path=ckpt_path)
        return callback

    # 3.25 is no spike beside a 5 in the window; without it, it would be.
    whole = fit(saver, rtol=0.7, warmup=2, window=4)
    resumed = fit(ckpt_path=saver.path, rtol=0.7, warmup=2, window=4)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.state_dict()["seen"] == 6
    assert resumed.state_dict()["recent"] == [[1.0, 1.0, 3.25, 1.0]]
    with pytest.raises(TrainingSpikeException):
        fit(ckpt_path=saver.path, rtol=0.7, warmup=2, window=2)
    fresh = {"seen": 0, "last": [], "recent": [], "waiting": [], "bad_batches": []}
    assert SpikeDetection().state_dict() == fresh
    # A new fit begins anew, but keeps what was found bad.
    whole.bad_batches = [7]
    quiet(callbacks=[whole]).fit(Told([50.0]), [torch.zeros(1)])
    assert whole.state_dict()["recent"] == [[50.0]]
    assert whole.bad_batches == [7]


def test_losses_that_are_on_their_way_are_not_forgotten(tmp_path: Path) -> None:
    callback = SpikeDetection(exclude_batches_path=tmp_path)
    callback._recent, callback._last, callback._seen = [__import__("collections").deque([1.0], 10)], [1.0], 5
    from hasten._lib.tree import send_to_host

    callback._pending.append((3, send_to_host([1.5, 1.0])))
    callback._pending.append((4, send_to_host([9.0, 1.0])))
    state = callback.state_dict()
    assert state["waiting"] == [[3, [1.5, 1.0]], [4, [9.0, 1.0]]]
    again = SpikeDetection(exclude_batches_path=tmp_path)
    again.load_state_dict(state)
    trainer = quiet(callbacks=[again])
    again._check(trainer, keep=1)
    assert again.state_dict()["seen"] == 6
    with pytest.raises(TrainingSpikeException, match="batch 4"):
        again.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]


def test_manual_optimisation_must_return_a_loss(tmp_path: Path) -> None:
    class Manual(Told):
        returned: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.returned

    module = Manual([])
    module.automatic_optimization = False
    module.returned = {"los": torch.zeros(())}
    with pytest.raises(TypeError, match="training_step returned dict without a loss"):
        quiet(callbacks=[SpikeDetection()]).fit(module, [torch.zeros(1)])
    module.returned = torch.tensor(1.0)
    quiet(callbacks=[SpikeDetection()], max_epochs=2).fit(module, [torch.zeros(1)] * 3)
    module.returned = {"loss": torch.tensor(NAN)}
    with pytest.raises(TrainingSpikeException):
        quiet(callbacks=[SpikeDetection(exclude_batches_path=tmp_path)]).fit(module, [torch.zeros(1)] * 2)


def test_a_spike_on_one_process_ends_all(tmp_path: Path) -> None:
    program = f"""
import torch
import hasten as L
from hasten.callbacks import SpikeDetection
from hasten.callbacks.spike import TrainingSpikeException
from tests.callbacks.test_spike import Told
from tests.models import quiet

class Mine(Told):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 1:
            return self.parameter * 0.0 + 9.0
        if batch_idx == 2 and self.global_rank == 0:
            return {{"loss": self.parameter * 0.0 + 1.0}}
        return self.parameter * 0.0 + 1.0 + self.global_rank

class Report(L.Callback):
    def on_exception(self, trainer, module, error):
        open(f"{tmp_path}/rank{{trainer.global_rank}}", "w").write(f"{{type(error).__name__}} {{error.batch_idx}}")

trainer = quiet(devices=2, strategy="ddp_fork", callbacks=[SpikeDetection(exclude_batches_path="{tmp_path}"), Report()])
trainer.fit(Mine([]), [torch.zeros(1)] * 8)
"""
    run_program(program, fails=True)
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert found == ["TrainingSpikeException 5"] * 2
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [4, 5]


def test_nothing_is_read_from_a_device_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    callback = SpikeDetection()
    monkeypatch.setattr(callback, "_check", lambda trainer, keep: read.append(keep))

    class OnDevice(Tensor):
        is_cuda = True

    trainer = quiet(callbacks=[callback])
    callback.on_train_batch_end(trainer, None, torch.tensor(1.0), None, 0)  # type: ignore[arg-type]
    callback.on_train_batch_end(trainer, None, torch.tensor(1.0).as_subclass(OnDevice), None, 1)  # type: ignore[arg-type]
    callback.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert read == [0, SpikeDetection.lag, 0]
    assert len(callback._pending) == 2
