"""Wrong arguments are refused when a callback is made, by a message that names them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.nn.utils import prune
from torch.optim.swa_utils import get_ema_avg_fn

from hasten.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)

NAN = float("nan")

# For each callback: the arguments it needs, and wrong ones with a part of the message (by default the argument).
REFUSED: dict[type, tuple[dict[str, Any], list[tuple[dict[str, Any], str | None]]]] = {
    BackboneFinetuning: (
        {},
        [
            (
                {"unfreeze_backbone_at_epoch": -1},
                r"unfreeze_backbone_at_epoch=-1\): use a whole number of at least 0",
            ),
            ({"unfreeze_backbone_at_epoch": 1.5}, None),
            ({"rounding": True}, None),
            ({"backbone_initial_ratio_lr": 0}, r"backbone_initial_ratio_lr=0\): use a number above 0\."),
            ({"backbone_initial_lr": -0.1}, r"backbone_initial_lr=-0.1\): use a number above 0, or None"),
            ({"initial_denom_lr": None}, None),
            ({"initial_denom_lr": "10"}, None),
            ({"lambda_func": 1.5}, r"lambda_func=1.5\): use a function"),
        ],
    ),
    BasePredictionWriter: (
        {},
        [({"write_interval": "batches"}, r"use one of 'batch', 'epoch', 'batch_and_epoch'.*'batch'")],
    ),
    EarlyStopping: (
        {"monitor": "val_loss"},
        [
            ({"mode": "best"}, None),
            ({"patience": -1}, None),
            ({"patience": 1.5}, None),
            ({"min_delta": "a"}, None),
            ({"stopping_threshold": "a"}, None),
            ({"monitor": 3}, None),
        ],
    ),
    EMAWeightAveraging: (
        {},
        [
            ({"decay": 1.1}, r"decay=1.1\): use a number from 0 to 1"),
            ({"decay": -0.1}, None),
            ({"decay": True}, None),
            ({"decay": "0.9"}, None),
            (
                {"update_every_n_steps": -1},
                r"update_every_n_steps=-1\): use a whole number of at least 0\.",
            ),
            ({"update_every_n_steps": None}, None),
            ({"update_starting_at_step": 1.5}, r"use a whole number of at least 0, or None"),
            ({"update_starting_at_epoch": True}, None),
        ],
    ),
    GradientAccumulationScheduler: (
        {},
        [
            ({"scheduling": {-1: 2}}, r"epoch=-1\): use a whole number of at least 0"),
            ({"scheduling": {1.0: 2}}, "epoch=1.0"),
            ({"scheduling": {True: 2}}, "epoch=True"),
            ({"scheduling": {2: 0}}, r"epoch 2=0\): use a whole number of batches, at least 1"),
            ({"scheduling": {2: 2.0}}, "epoch 2=2.0"),
            ({"scheduling": {2: True}}, "epoch 2=True"),
        ],
    ),
    LearningRateMonitor: ({}, [({"logging_interval": "batch"}, None)]),
    ModelCheckpoint: (
        {},
        [
            ({"mode": "best"}, None),
            ({"save_top_k": -2}, "save_top_k=-2"),
            ({"save_top_k": 2}, "monitor=None"),
            ({"every_n_epochs": -1}, None),
            ({"every_n_train_steps": -1}, None),
            ({"every_n_epochs": 1, "every_n_train_steps": 1}, "mutually exclusive"),
            ({"every_n_epochs": 1, "train_time_interval": timedelta(1)}, "mutually exclusive"),
            ({"save_last": "yes"}, None),
            ({"monitor": ""}, None),
            ({"filename": "../{epoch}"}, "leaves the folder"),
            ({"filename": "/tmp/{epoch}"}, "leaves the folder"),
            ({"filename": "{epoch:zz}"}, "not a format of a number"),
            ({"filename": "{}"}, "without a name"),
        ],
    ),
    ModelPruning: (
        {"pruning_fn": "l1_unstructured"},
        [
            ({"pruning_fn": "l1"}, r"pruning_fn='l1'\): use one of 'ln_structured', 'l1_unstructured'"),
            ({"pruning_fn": 5}, r"pruning_fn=5\): use one of"),
            ({"pruning_fn": prune.L1Unstructured(1)}, "the class, not an instance"),
            ({"pruning_fn": prune.LnStructured}, "structured pruning ranks one parameter at a time"),
            (
                {"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False},
                "a class needs use_global",
            ),
            ({"pruning_fn": "random_structured", "use_global_unstructured": False}, "pruning_dim"),
            (
                {"pruning_fn": "ln_structured", "pruning_dim": 0, "use_global_unstructured": False},
                "pruning_norm",
            ),
            ({"pruning_fn": "random_structured", "pruning_dim": 0}, "Use use_global_unstructured=False"),
            ({"parameter_names": ["weights"]}, r"'weights'\): use one of 'weight', 'bias'.*'weight'"),
            ({"amount": "0.5"}, r"amount='0.5'\): use a share from 0.0 to 1.0 \(float\), a number"),
            ({"amount": True}, None),
            ({"amount": 1.5}, None),
            ({"amount": -1}, None),
            ({"verbose": 3}, r"verbose=3\): use one of 0, 1, 2"),
        ],
    ),
    ModelSummary: ({}, [({"max_depth": -2}, None)]),
    RichProgressBar: ({}, [({"refresh_rate": rate}, None) for rate in (-1, True, "fast", None)]),
    SpikeDetection: (
        {},
        [
            ({"mode": "mix"}, r"mode='mix'\): use one of 'min', 'max'"),
            ({"window": 0}, r"window=0\): use a whole number of at least 1"),
            ({"window": 1.5}, None),
            ({"warmup": -1}, r"warmup=-1\): use a whole number of at least 0"),
            ({"warmup": True}, None),
            ({"atol": -1.0}, r"atol=-1.0\): use a number of at least 0, or None"),
            ({"rtol": "2"}, None),
            ({"rtol": NAN}, None),
            ({"rtol": True}, None),
        ],
    ),
    StochasticWeightAveraging: (
        {"swa_lrs": 0.1},
        [
            ({"swa_lrs": 0}, r"swa_lrs=0\): use a number above 0, or a list"),
            ({"swa_lrs": -0.1}, None),
            ({"swa_lrs": True}, None),
            ({"swa_lrs": []}, r"swa_lrs=\[\]"),
            ({"swa_lrs": [0.1, "a"]}, "swa_lrs="),
            ({"swa_epoch_start": 0}, r"swa_epoch_start=0\): use an epoch counted from 1"),
            ({"swa_epoch_start": 1.1}, None),
            ({"swa_epoch_start": -0.1}, None),
            ({"swa_epoch_start": True}, None),
            ({"swa_epoch_start": "5"}, None),
            ({"annealing_epochs": -1}, r"annealing_epochs=-1\): use a whole number of at least 0"),
            ({"annealing_epochs": 1.5}, None),
            ({"annealing_epochs": True}, None),
            ({"annealing_strategy": "linea"}, "annealing_strategy='linea'.*'cos', 'linear'.*'linear'"),
            ({"avg_fn": 5}, r"avg_fn=5\): use a function"),
            ({"device": "gpu7"}, "StochasticWeightAveraging.device='gpu7'"),
        ],
    ),
    Timer: ({}, [({"duration": "soon"}, "duration"), ({"duration": 5}, None), ({"interval": "batch"}, None)]),
    TQDMProgressBar: (
        {},
        [({"refresh_rate": -1}, None), ({"refresh_rate": 1.5}, None), ({"process_position": -1}, None)],
    ),
    WeightAveraging: (
        {},
        [
            ({"avg_fn": 0.9}, r"avg_fn=0.9\): use a function"),
            ({"avg_fn": get_ema_avg_fn(), "multi_avg_fn": print}, "Give one of them"),
            ({"device": "gpu7"}, r"device='gpu7'\): use a device such as"),
            ({"device": True}, None),
        ],
    ),
}
CASES = [
    (kind, {**needed, **wrong}, message or f"{next(iter(wrong))}={next(iter(wrong.values()))!r}")
    for kind, (needed, cases) in REFUSED.items()
    for wrong, message in cases
]


@pytest.mark.parametrize(("kind", "arguments", "message"), CASES, ids=range(len(CASES)))
def test_wrong_values(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (DeviceStatsMonitor, {"cpu_stats": "yes"}, "cpu_stats='yes'"),
        (EMAWeightAveraging, {"avg_fn": print}, r"Use WeightAveraging\(avg_fn=...\)"),
        (GradientAccumulationScheduler, {"scheduling": {}}, r"scheduling=\{\}\): give a dict"),
        (
            GradientAccumulationScheduler,
            {"scheduling": [(0, 2)]},
            "give a dict of epoch to number of batches",
        ),
        (LambdaCallback, {"on_train_strat": print}, r"no hook of that name.*'on_train_start'"),
        (LambdaCallback, {"on_train_start": 3}, r"on_train_start=3\): use a function"),
        (ModelCheckpoint, {"train_time_interval": 5}, "train_time_interval=5"),
        (ModelCheckpoint, {"every_n_epochs": 1.5}, "every_n_epochs=1.5"),
        (ModelCheckpoint, {"filename": 5}, "filename"),
        (ModelCheckpoint, {"dirpath": 5}, "dirpath=5"),
        (OnExceptionCheckpoint, {"dirpath": None}, r"dirpath=None\): use a path"),
        (ThroughputMonitor, {"batch_size_fn": 4}, r"ThroughputMonitor\(batch_size_fn=4\)"),
        (ThroughputMonitor, {"batch_size_fn": len, "length_fn": "x"}, r"ThroughputMonitor\(length_fn='x'\)"),
        (WeightAveraging, {"avg_fun": print}, r"WeightAveraging\(avg_fun=...\).*avg_fn"),
    ],
)
def test_wrong_types(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (EMAWeightAveraging, {"decay": 1}),
        (EMAWeightAveraging, {"decay": 0}),
        (ModelPruning, {"pruning_fn": "l1_unstructured", "amount": 1}),
        (ModelPruning, {"pruning_fn": "l1_unstructured", "amount": 1.0}),
        (SpikeDetection, {"atol": 0, "rtol": 0}),
    ],
)
def test_limits_are_allowed(kind: type, arguments: dict[str, Any]) -> None:
    kind(**arguments)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"filename=''\): give a name without .ckpt"):
        OnExceptionCheckpoint(".", "")
    with pytest.raises(ValueError, match="filename=None"):
        OnExceptionCheckpoint(".", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window_size=1"):
        ThroughputMonitor(len, window_size=1)
