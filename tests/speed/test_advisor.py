"""The advisor on a model in hand, with processes: its verdicts, and that nothing of it is left."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten._lib.errors import MisconfigurationException
from hasten.seed import collect_rng_state
from hasten_tools.speed import changes
from hasten_tools.speed.advice import Advice, figures
from hasten_tools.speed.levers import Lever, choose, expected_gain
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import Turn
from tests.models import loader, quiet, same_weights
from tests.refusals import refused
from tests.speed import planted


@pytest.fixture(autouse=True)
def _in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_fork_server: None) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def advise(model: Any, given: Any, data: Any = None, **options: Any) -> Advice:
    options = {"rounds": 1, "steps": 2, "warm_up": 1, "verbose": False, **options}
    found: Advice = quiet(max_epochs=50).advise(model, data or loader(shuffle=True), levers=given, **options)
    return found


def children() -> set[int]:
    """Return the processes that this one started and that are still there, as zombies too."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


def test_planted_levers_get_their_verdicts_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, before = planted.Sleeper(), set(children())
    weights, state = copy.deepcopy(model.layer), collect_rng_state()
    given = [planted.LIAR, planted.DYING, planted.QUICK]

    found = advise(model, given, verbose=True)

    assert {row.name: row.verdict for row in found.rows} == {"liar": "wrong", "dying": "failed", "quick": "wins"}
    assert "SIGKILL" in found.row("dying").reason
    # Fast and wrong is no gain.
    assert (found.row("liar").speed or 0) > 1.5
    assert (found.winners, found.line) == (["quick"], "quick()")
    shown = capsys.readouterr().out
    assert "computes something else: liar" in shown
    assert "\x1b" not in shown
    assert found.unchanged.mfu is not None
    assert found.facts["flops_per_step"] > 0
    assert found.parts["forward"] > 0.5 * sum(found.parts.values())

    assert children() == before
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []
    assert same_weights(model.layer, weights)
    after = collect_rng_state()
    assert (after["python"], after["torch"]) == (state["python"], state["torch"])
    assert model._trainer is None
    assert model.nap_seconds == planted.NAP_SECONDS


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_measured_in_parts() -> None:
    found = advise(planted.Hungry(), ["micro-batches", planted.QUICK])
    assert found.row("micro-batches").verdict == "needed"
    assert found.row("quick").verdict == "wins", found.table()
    assert found.facts["memory_ran_out"]
    assert found.line == 'L.Trainer(..., micro_batch="auto"); quick()'
    assert found.winners == ["micro-batches", "quick"]
    assert found.arguments == {"micro_batch": "auto"}


def unpicklable() -> planted.Sleeper:
    model = planted.Sleeper()
    model.__dict__["unpicklable"] = lambda: None
    return model


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": planted.Broken()}, RuntimeError, "cannot be measured: KeyError: 'no such column'"),
        ({"model": unpicklable()}, TypeError, r"the model cannot be sent.*hasten advise program\.py"),
        ({"given": ["compil"]}, ValueError, "Did you mean 'compile'"),
        ({"given": ["fused"]}, ValueError, "Did you mean 'fused optimizer'"),
        ({"given": [3]}, TypeError, "names of speed-ups"),
        ({"given": [planted.LIAR, planted.LIAR]}, ValueError, "twice"),
        ({"rounds": 0}, ValueError, "rounds=0"),
        ({"budget_seconds": -1.0}, ValueError, "budget_seconds=-1"),
        ({"given": [Lever("l", "l", Safety.ROUNDING, change=lambda *_: None)]}, ValueError, "top of a module"),
    ],
)
def test_wrong_use_is_an_error_before_any_lever_is_measured(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        advise(**{"model": planted.Sleeper(), "given": ["compile"], **options})


def test_a_training_without_data_or_model_is_an_error() -> None:
    with refused(MisconfigurationException, says=("advise()", "train_dataloaders")):
        quiet().advise(planted.Sleeper())
    with refused(TypeError, "model", says="`LightningModule`"):
        quiet().advise(torch.nn.Linear(2, 2), loader())  # type: ignore[arg-type]


# -- speed-ups and figures


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ({}, 0.8),
        ({"matmul_precision": "'high'"}, 0.2),
        ({"matmul_precision": "'medium'"}, 0.1),
        ({"matmul_precision": "'highest'"}, 0.8),
        ({"matmul_precision": "'high'", "precision": "'bf16-mixed'"}, 0.1),
        # Others had the device while its peak was measured.
        ({"precision": "'bf16-mixed'", "peak": 1e9}, None),
    ],
)
def test_the_share_of_the_peak_is_that_of_the_type_computed_in(arguments: Any, share: float | None) -> None:
    peaks = {"float32": 1e10, "tf32": 4e10, "bfloat16": arguments.pop("peak", 8e10)}
    facts = {"flops_per_step": 8e9, "samples_counted": 1, "peak_flops": peaks}
    found = figures([Turn(1.0, [1.0], samples=1)], facts, arguments, [])["mfu"]
    assert found == (None if share is None else pytest.approx(share))


def test_samples_of_batches_by_length_count_as_samples_of_the_usual_length() -> None:
    usual = Turn(1.0, [1.0], samples=4, tokens=40, slots=80)
    short = Turn(1.0, [1.0], samples=4, tokens=20, slots=20)
    found = figures([short], {}, {}, [usual])
    assert (found["samples_per_second"], found["useful_tokens"]) == (2.0, 1.0)


def test_attention_dropout_is_found_and_taken_off_alone() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.1)
    assert [name for _, name in changes.attention_dropouts(layer)] == ["dropout"]
    changes.no_attention_dropout(layer)
    assert layer.self_attn.dropout == 0.0
    assert layer.dropout.p == 0.1


def test_the_name_of_an_argument_stands_for_its_levers() -> None:
    names = [lever.name for lever in choose(["packed", "allocator", "bf16 autocast"])]
    assert names[:3] == ["packed tokens", "packed first token", "kept memory"]
    assert names[-1] == "bf16 autocast"


def test_every_lever_has_a_line_a_class_and_known_arguments() -> None:
    from hasten.arguments import SPEED_NAMES

    for lever in choose(None):
        assert set(lever.arguments) <= {*SPEED_NAMES, "precision"}, lever
        assert lever.line
        assert "," not in lever.name  # They are listed with commas between on the command line.
        for name, value in lever.arguments.items():
            assert f"{name}={json.dumps(value) if isinstance(value, str) else value}" in lever.line
        assert all(other in {each.name for each in choose(None)} for other in lever.conflicts)


def test_levers_that_gain_most_by_what_was_found_come_first() -> None:
    def first(*names: str, **facts: Any) -> str:
        return max(choose(names), key=lambda lever: expected_gain(lever, facts)).name

    names = ("kept memory", "fused optimizer", "resident data", "packed tokens", "bf16 autocast")
    assert first(*names, useful_tokens=0.2) == "packed tokens"
    assert first(*names, parts={"forward": 1.0, "data wait": 3.0}) == "resident data"
    assert first(*names, parts={"forward": 1.0, "optimizer": 3.0}) == "fused optimizer"
    assert first(*names, peak_flops={"bfloat16": 8e12, "float32": 1e12}) == "bf16 autocast"
    assert first(*names, parts={"forward": 1.0}, faults_per_step=400_000) == "kept memory"
    # Peaks measured on a busy machine do not promise more than a step can gain.
    noisy = {"bfloat16": 1e14, "float32": 1e12}
    assert first(*names, useful_tokens=0.3, peak_flops=noisy) == "packed tokens"
    # It was named: it comes before the speed-ups that hasten knows.
    assert expected_gain(planted.QUICK, {}) > 100
