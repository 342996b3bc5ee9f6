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
from tests.callbacks.scripted import Losses
from tests.models import quiet
from tests.refusals import refused

NAN, INF = math.nan, math.inf


def spiked(losses: list[Any], folder: Path, *, an_epoch: int = 100, trainer: Any = None, **options: Any) -> int | None:
    """Return the batch at which the run ended, or None."""
    callback = SpikeDetection(exclude_batches_path=folder, **options)
    run = quiet(callbacks=[callback], max_epochs=-(-len(losses) // an_epoch), **(trainer or {}))
    try:
        run.fit(Losses(losses), [torch.zeros(1)] * min(an_epoch, len(losses)))
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


def test_epochs_accumulation_and_weights_do_not_make_spikes(tmp_path: Path) -> None:
    def weighted(weight: float) -> list[Any]:
        return [{"loss": 1.0, "loss_weight": torch.tensor(weight * (1 + i % 2))} for i in range(7)]

    options: dict[str, Any] = {"rtol": 0.1, "trainer": {"accumulate_grad_batches": 4}}
    assert spiked(weighted(3.0), tmp_path, rtol=0.1) is None
    for losses in ([1.0] * 7, weighted(3.0), weighted(0.0)):
        assert spiked(losses, tmp_path, **options) is None
    assert spiked([*[1.0] * 6, 1.2], tmp_path, **options) == 6
    assert spiked([1.0, 1.0, 1.2, 1.0], tmp_path, **options) == 2
    # Batches are named by their index in the epoch.
    assert spiked([1.0, 1.0, 9.0], tmp_path, an_epoch=2) == 0
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [0]


def test_the_file_and_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        (tmp_path / "a" / "bad.json", tmp_path / "a" / "bad.json"),
        (str(tmp_path / "b"), tmp_path / "b" / "skip_batches.json"),
        (None, tmp_path / "root" / "skip_batches.json"),
    ):
        callback = SpikeDetection(exclude_batches_path=given)
        callback.bad_batches = [1]  # Once in the list is enough.
        trainer = quiet(callbacks=[callback], default_root_dir=tmp_path / "root")
        with refused(TrainingSpikeException, says=("batch 2", "epoch 1", "[1", "2]")) as caught:
            trainer.fit(Losses([1.0, 1.0, 9.0]), [torch.zeros(1)] * 3)
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
        trainer.fit(Losses(losses), [torch.zeros(1)] * 6, ckpt_path=ckpt_path)
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
    quiet(callbacks=[whole]).fit(Losses([50.0]), [torch.zeros(1)])
    assert whole.state_dict()["recent"] == [[50.0]]
    assert whole.bad_batches == [7]


def test_losses_that_are_on_their_way_are_in_the_state(tmp_path: Path) -> None:
    pending = [[3, [1.5, 1.0]], [4, [9.0, 1.0]]]
    state = {"seen": 5, "last": [1.0], "recent": [[1.0]], "waiting": pending, "bad_batches": [1]}
    callback = SpikeDetection(exclude_batches_path=tmp_path)
    callback.load_state_dict(state)
    assert callback.state_dict() == state
    trainer = quiet(callbacks=[callback])
    with refused(TrainingSpikeException, says="batch 4"):
        callback.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert callback.state_dict()["seen"] == 7
    assert callback.bad_batches == [1, 3, 4]


def test_manual_optimization_must_return_a_loss(tmp_path: Path) -> None:
    class Manual(Losses):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.losses[0]

    def fit(returned: Any) -> None:
        trainer = quiet(callbacks=[SpikeDetection(exclude_batches_path=tmp_path)], max_epochs=2)
        module = Manual([returned])
        module.automatic_optimization = False
        trainer.fit(module, [torch.zeros(1)] * 3)

    with refused(TypeError, says="training_step"):
        fit({"los": torch.zeros(())})
    fit(torch.tensor(1.0))
    fit(torch.tensor(1))
    with pytest.raises(TrainingSpikeException):
        fit({"loss": torch.tensor(NAN)})


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
