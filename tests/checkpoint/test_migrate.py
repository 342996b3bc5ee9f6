"""Checkpoints of Lightning come over with their counters."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hasten.checkpoint.contents import from_lightning
from hasten.loops.run import Progress


def counts(ready: int, completed: int, processed: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, "started": ready, "processed": processed}


def lightning(
    *,
    epoch: int,
    global_step: int,
    batch: tuple[int, int],
    total: tuple[int, int],
    epochs_processed: int,
    last: bool = False,
    stepped: int = 0,
    optimizers: int = 1,
    automatic: bool = True,
) -> dict[str, Any]:
    """Return a checkpoint as Lightning 2.6 writes it; batches are (processed, completed)."""
    done = global_step if automatic else 0
    return {
        "epoch": epoch,
        "global_step": global_step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"weight": 1},
        "optimizer_states": [{}] * optimizers,
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": stepped},
                "epoch_loop.batch_progress": {
                    "total": counts(total[0], total[1], total[0]),
                    "current": counts(batch[0], batch[1], batch[0]),
                    "is_last_batch": last,
                },
                "epoch_loop.automatic_optimization.optim_progress": {
                    "optimizer": {"step": {"total": {"ready": done, "completed": done}}}
                },
                "epoch_progress": {"current": counts(epoch + 1, epoch, epochs_processed)},
            },
            "validate_loop": {},
        },
        "callbacks": {"EarlyStopping{'monitor': 'v', 'mode': 'min'}": {"wait_count": 1}},
    }


def progress(checkpoint: dict[str, Any]) -> Progress:
    found = Progress()
    found.load_state_dict(from_lightning(checkpoint)["loops"]["fit"])
    return found


def test_checkpoint_of_ours_comes_back_as_it_is() -> None:
    ours = {"pytorch-lightning_version": "2.6.0", "hasten_version": "0.1.0", "loops": {"fit": {}}}
    assert from_lightning(ours) is ours
    foreign = {"state_dict": {}}
    assert from_lightning(foreign) is foreign


def test_all_counters_are_given_and_the_rest_is_kept() -> None:
    theirs = lightning(epoch=1, global_step=4, batch=(2, 1), total=(7, 6), epochs_processed=1)
    before = copy.deepcopy(theirs)
    ours = from_lightning(theirs)
    assert theirs == before
    assert set(ours["loops"]["fit"]) == set(Progress().state_dict())
    assert len(ours["loops"]["fit"]) == 10  # A new counter is a change of the format.
    assert {key: value for key, value in ours.items() if key != "loops"} == {
        key: value for key, value in theirs.items() if key != "loops"
    }


# Batches are (processed, completed), five an epoch, two accumulated: as on_train_batch_end sees it; after a validation
# within the epoch; and in manual optimization, which counts batches and steps apart.
AT = {
    "after a batch": (
        {"epoch": 1, "global_step": 4, "batch": (2, 1), "total": (7, 6), "epochs_processed": 1, "stepped": 3},
        Progress(epoch=1, batch=2, total_batches=7, global_step=4, logged_step=4, post_batch_done=False),
    ),
    "after a validation": (
        {"epoch": 2, "global_step": 7, "batch": (3, 3), "total": (13, 13), "epochs_processed": 2, "stepped": 7},
        Progress(epoch=2, batch=3, total_batches=13, global_step=7, logged_step=7),
    ),
    **{
        f"manual, {optimizers} optimizers": (
            {"epoch": 0, "global_step": 10, "batch": (5, 4), "total": (5, 4), "epochs_processed": 0, "stepped": 4,
             "optimizers": optimizers, "automatic": False},
            Progress(batch=5, total_batches=5, global_step=10, logged_step=5, post_batch_done=False),
        )
        for optimizers in (1, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("moment", AT)
def test_counters_within_an_epoch(moment: str) -> None:
    theirs, ours = AT[moment]
    assert progress(lightning(**theirs)) == ours


def test_at_the_end_of_an_epoch() -> None:
    theirs = lightning(epoch=2, global_step=9, batch=(5, 5), total=(15, 15), epochs_processed=3, last=True, stepped=9)
    found = progress(theirs)
    assert (found.epoch, found.epochs_done, found.mid_epoch) == (2, 3, False)
    found.next_epoch()
    assert (found.epoch, found.batch, found.total_batches) == (3, 0, 15)
    # Without counters the epoch counts as complete.
    theirs = {"pytorch-lightning_version": "2.0.0", "epoch": 3, "global_step": 40, "state_dict": {}}
    found = progress(theirs)
    assert (found.epochs_done, found.global_step, found.mid_epoch) == (4, 40, False)
