"""Wrong arguments are refused when a callback is made, by a message that names them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch.nn.utils import prune
from torch.optim.swa_utils import get_ema_avg_fn

from hasten import callbacks as cb
from tests.refusals import warned

NAN = float("nan")

# The arguments that a callback needs beside the wrong one.
NEEDED: dict[type, dict[str, Any]] = {
    cb.EarlyStopping: {"monitor": "val_loss"},
    cb.ModelPruning: {"pruning_fn": "l1_unstructured"},
    cb.StochasticWeightAveraging: {"swa_lrs": 0.1},
}
# The message begins with "Callback(argument=value): use".
WRONG: dict[type, dict[str, list[Any]]] = {
    cb.BackboneFinetuning: {
        "unfreeze_backbone_at_epoch": [-1, 1.5],
        "rounding": [True],
        "backbone_initial_ratio_lr": [0],
        "backbone_initial_lr": [-0.1],
        "initial_denom_lr": [None, "10"],
        "lambda_func": [1.5],
    },
    cb.BasePredictionWriter: {"write_interval": ["batches"]},
    cb.BatchSizeFinder: {
        "mode": ["bin"],
        "steps_per_trial": [0],
        "max_trials": [True],
        "max_val": [2.5],
        "margin": [-0.1],
    },
    cb.EarlyStopping: {
        "mode": ["best"],
        "patience": [-1, 1.5],
        "min_delta": ["a"],
        "stopping_threshold": ["a"],
        "monitor": [3, ""],
    },
    cb.EMAWeightAveraging: {
        "decay": [1.1, -0.1, True, "0.9"],
        "update_every_n_steps": [-1, None],
        "update_starting_at_step": [1.5],
        "update_starting_at_epoch": [True],
    },
    cb.GarbageCollection: {"every_n_steps": [0, 1.5, "a"], "generation": [-1, 3, True]},
    cb.LearningRateFinder: {"mode": ["exp"]},
    cb.LearningRateMonitor: {"logging_interval": ["batch"]},
    cb.MemorySnapshot: {"dirpath": [3], "max_entries": [0, 1.5]},
    cb.ModelCheckpoint: {
        "mode": ["best"],
        "save_top_k": [-2],
        "every_n_epochs": [-1],
        "every_n_train_steps": [-1],
        "save_last": ["yes"],
        "monitor": [""],
    },
    cb.ModelPruning: {"pruning_fn": ["l1", 5], "amount": ["0.5", True, 1.5, -1], "verbose": [3]},
    cb.RichProgressBar: {"refresh_rate": [-1, True, "fast", None]},
    cb.SpikeDetection: {
        "mode": ["mix"],
        "window": [0, 1.5],
        "warmup": [-1, True],
        "atol": [-1.0],
        "rtol": ["2", NAN, True],
    },
    cb.StochasticWeightAveraging: {
        "swa_lrs": [0, -0.1, True, [], [0.1, "a"]],
        "swa_epoch_start": [0, 1.1, -0.1, True, "5"],
        "annealing_epochs": [-1, 1.5, True],
        "annealing_strategy": ["linea"],
        "avg_fn": [5],
        "device": ["gpu7"],
    },
    cb.Timer: {"duration": [5], "interval": ["batch"]},
    cb.TQDMProgressBar: {"refresh_rate": [-1, 1.5], "process_position": [-1]},
    cb.WeightAveraging: {"avg_fn": [0.9], "device": ["gpu7", True]},
}
VALUES = [(kind, name, value) for kind, wrong in WRONG.items() for name, values in wrong.items() for value in values]


@pytest.mark.parametrize(("kind", "name", "value"), VALUES, ids=range(len(VALUES)))
def test_wrong_values(kind: type, name: str, value: Any) -> None:
    message = re.escape(f"{kind.__name__}({name}={value!r}): ") + rf"(use |{re.escape(repr(value))} is unknown\. Did)"
    with pytest.raises(ValueError, match=message):
        kind(**{**NEEDED.get(kind, {}), name: value})


# Other messages, most of them of arguments that do not go together.
OTHERS: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (cb.DeviceStatsMonitor, {"cpu_stats": "yes"}, TypeError, "cpu_stats='yes'"),
    (cb.EMAWeightAveraging, {"avg_fn": print}, TypeError, r"Use WeightAveraging\(avg_fn=...\)"),
    (cb.GradientAccumulationScheduler, {"scheduling": {}}, TypeError, r"scheduling=\{\}\): give a dict"),
    (cb.GradientAccumulationScheduler, {"scheduling": [(0, 2)]}, TypeError, "give a dict of epoch to number"),
    *(
        (cb.GradientAccumulationScheduler, {"scheduling": {epoch: batches}}, ValueError, message)
        for epoch, batches, message in (
            (-1, 2, r"epoch=-1\): use a whole number of at least 0"),
            (1.0, 2, "epoch=1.0"),
            (True, 2, "epoch=True"),
            (2, 0, r"epoch 2=0\): use a whole number of batches, at least 1"),
            (2, 2.0, "epoch 2=2.0"),
            (2, True, "epoch 2=True"),
        )
    ),
    (cb.LambdaCallback, {"on_train_strat": print}, TypeError, r"unknown hook.*'on_train_start'"),
    (cb.LambdaCallback, {"on_train_start": 3}, TypeError, r"on_train_start=3\): use a function"),
    (cb.LearningRateFinder, {"min_lr": 2.0}, ValueError, r"min_lr=2\.0, max_lr=1"),
    (cb.LearningRateFinder, {"num_training_steps": 0}, ValueError, "num_training_steps=0"),
    (cb.ModelCheckpoint, {"save_top_k": 2}, ValueError, "monitor=None"),
    (cb.ModelCheckpoint, {"filename": "../{epoch}"}, ValueError, "leaves the folder"),
    (cb.ModelCheckpoint, {"filename": "/tmp/{epoch}"}, ValueError, "leaves the folder"),
    (cb.ModelCheckpoint, {"filename": "{epoch:02d-{val_loss:.2f}"}, ValueError, "a brace is missing"),
    (cb.ModelCheckpoint, {"filename": "{epoch:zz}"}, ValueError, "not a format of a number"),
    (cb.ModelCheckpoint, {"filename": "{}"}, ValueError, "without a name"),
    (cb.ModelCheckpoint, {"every_n_epochs": 1.5}, TypeError, "every_n_epochs=1.5"),
    (cb.ModelCheckpoint, {"filename": 5}, TypeError, "filename"),
    (cb.ModelCheckpoint, {"dirpath": 5}, TypeError, "dirpath=5"),
    (
        cb.ModelPruning,
        {"parameter_names": ["weights"]},
        ValueError,
        r"'weights'\): 'weights' is unknown. Did you mean 'weight'",
    ),
    (cb.ModelPruning, {"pruning_fn": prune.L1Unstructured(1)}, ValueError, "the class, not an instance"),
    (
        cb.ModelPruning,
        {"pruning_fn": prune.LnStructured},
        ValueError,
        'Only the "unstructured" PRUNING_TYPE is supported',
    ),
    *(
        (cb.ModelPruning, {"pruning_fn": fn, "use_global_unstructured": False, **options}, ValueError, message)
        for fn, options, message in (
            (prune.L1Unstructured, {}, "only supported with `use_global_unstructured=True`"),
            ("random_structured", {}, "pruning_dim"),
            ("ln_structured", {"pruning_dim": 0}, "pruning_norm"),
        )
    ),
    (cb.ModelPruning, {"pruning_fn": "random_structured", "pruning_dim": 0}, ValueError, "unstructured=False"),
    (cb.ModelSummary, {"max_depth": -2}, ValueError, "max_depth=-2"),
    (cb.OnExceptionCheckpoint, {"dirpath": None}, TypeError, r"dirpath=None\): use a path"),
    (cb.OnExceptionCheckpoint, {"dirpath": ".", "filename": ""}, ValueError, r"give a name without .ckpt"),
    (cb.OnExceptionCheckpoint, {"dirpath": ".", "filename": None}, ValueError, "filename=None"),
    (cb.ThroughputMonitor, {"batch_size_fn": 4}, TypeError, r"ThroughputMonitor\(batch_size_fn=4\)"),
    (cb.ThroughputMonitor, {"batch_size_fn": len, "length_fn": "x"}, TypeError, r"\(length_fn='x'\)"),
    (cb.ThroughputMonitor, {"batch_size_fn": len, "window_size": 1}, ValueError, "window_size=1"),
    (cb.Timer, {"duration": "soon"}, ValueError, "duration"),
    (cb.WeightAveraging, {"avg_fn": get_ema_avg_fn(), "multi_avg_fn": print}, ValueError, "Give one of them"),
    (cb.WeightAveraging, {"avg_fun": print}, TypeError, r"WeightAveraging\(avg_fun=...\).*avg_fn"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), OTHERS, ids=range(len(OTHERS)))
def test_other_refusals(kind: type, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**{**NEEDED.get(kind, {}), **arguments})


def test_limits_are_allowed() -> None:
    for decay in (0, 1):
        cb.EMAWeightAveraging(decay=decay)
    for amount in (1, 1.0):
        assert cb.ModelPruning("l1_unstructured", amount=amount).amount == amount
    cb.SpikeDetection(atol=0, rtol=0)


def test_the_name_of_a_file_or_a_value_as_the_folder_is_said() -> None:
    with warned(UserWarning, fix="ModelCheckpoint(filename='best')", says="dirpath='runs/best.ckpt'"):
        cb.ModelCheckpoint("runs/best.ckpt")
    with warned(UserWarning, fix="monitor='val_loss', mode='min'", says="no value is monitored"):
        cb.ModelCheckpoint("val_loss", "ckpts")
