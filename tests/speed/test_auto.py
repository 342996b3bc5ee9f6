"""``Trainer(speed="auto")``: what is measured, remembered and switched on, and what is off again after training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.arguments import SPEEDS
from hasten.loggers import CSVLogger
from hasten_tools.report.read import read_run
from hasten_tools.speed import auto, levers
from hasten_tools.speed.advice import Advice, Line, Row, recall, remember
from hasten_tools.speed.inspect_run import data_shape, key_of
from hasten_tools.speed.levers import Lever
from hasten_tools.speed.races import Plan
from hasten_tools.speed.safety import Safety
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused
from tests.speed import planted

pytestmark = pytest.mark.usefixtures("only_naps_take_long")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def keep(winners: list[str], model: Any, **more: Any) -> str:
    """Keep a verdict for the Trainer and the model of these tests; return its key."""
    key = key_of(quiet(speed="auto").given_arguments, model, torch.device("cpu"), data_shape(loader(), None, model))
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
    lines = [Line(Safety.ROUNDING, "all of it", winners, 3.0)]
    advice = Advice("train.py", unchanged, **{"rows": [], "lines": lines, "winners": winners, **more})
    assert remember(key, advice) is not None
    assert recall(key) == advice
    return key


class Watches(Classifier):
    """Notes the number of threads, and the class of what it reads."""

    def on_train_start(self) -> None:
        self.threads = torch.get_num_threads()
        self.arguments = self.trainer.given_arguments


def test_arguments_are_those_that_end_no_training(caplog: pytest.LogCaptureFixture) -> None:
    keep(["fused optimizer", "resident data"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert (model.arguments["fused_optimizer"], model.arguments["resident"]) == (True, "auto")
    assert "3.0x with L.Trainer(..., fused_optimizer=True, resident=True) (remembered)" in caplog.text
    # By another optimizer, which an argument of the program chooses.
    with_another = Watches()
    with_another.configure_optimizers = lambda: torch.optim.LBFGS(with_another.parameters(), lr=0.1)  # type: ignore[method-assign]
    quiet(speed="auto").fit(with_another, loader())
    assert "The optimizer stays as it is. Trainer(fused_optimizer=True): torch has no fused LBFGS" in caplog.text


def test_auto_takes_of_a_full_verdict_what_it_promises(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lines = [
        Line(Safety.ROUNDING, "fused()", ["fused optimizer"], 1.5),
        Line(Safety.OTHER_BATCHES, "fused() and length()", ["fused optimizer", "batches by length"], 3.0),
    ]
    # As an older version, or somebody by hand, may have written it.
    winners = ["fused optimizer", "batches by length", "bf16 autocast"]
    row = Row("fused optimizer", "fused()", Safety.ROUNDING, "wins", speed=1.5)
    keep(winners, model := Classifier(), lines=lines, facts={"step_draws": True}, rows=[row])
    trainer = quiet(speed="auto", logger=CSVLogger(tmp_path))
    trainer.fit(model, loader())
    given = trainer.given_arguments
    assert (given["fused_optimizer"], given["batching"], given["precision"]) == (True, None, None)
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text
    assert "Measured were 3.0x with fused() and length() (same samples in other batches)" in caplog.text
    written = read_run(tmp_path).advice
    assert written is not None
    assert (written["line"], written["rows"]) == (
        "fused()", [{"name": "fused optimizer", "factor": 1.5, "low": None, "high": None, "verdict": "wins"}]
    )  # fmt: skip


def test_threads_are_as_before_after_each_training() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        keep(["one thread"], model := Watches())
        trainer = quiet(speed="auto")
        for _ in range(2):
            # The second training goes on with what the first one chose.
            trainer.fit(model, loader())
            assert (model.threads, torch.get_num_threads()) == (1, 2)
            trainer.fit_loop.max_epochs += 1
    finally:
        torch.set_num_threads(before)


def test_a_run_of_several_processes_is_measured_with_the_threads_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Watches):
        """Notes the threads of its steps; the fit itself, in two processes, does not begin."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            counted.add(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    counted: set[int] = set()
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("hasten.machine.launch.usable_cores", lambda: 6)
    torch.set_num_threads(6)
    try:
        trainer = quiet(speed="auto", devices=2, strategy="ddp_spawn", max_epochs=3)
        with auto.choose_speed(trainer, Counts(), loader(), None):
            pass
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
    # Speed-ups may have tried fewer.
    assert max(counted) == 3


def test_what_needs_consent_or_another_process_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    keep(["fused optimizer", "tcmalloc", "no attention dropout", "gone since"], model := Watches())
    quiet(speed="auto").fit(model, loader())
    assert model.arguments["allocator"] is None
    # The speed was measured with all of them: it is not claimed.
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text


# -- trainings that are too short to measure


@pytest.mark.parametrize("arguments", [{"max_steps": 3}, {"fast_dev_run": True}])
def test_a_training_of_few_steps_starts_at_once(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "measure", never)
    trainer = quiet(**{"max_epochs": None, "speed": "auto", **arguments})
    trainer.fit(planted.Sleeper(0.0), loader())
    assert trainer.global_step == (1 if "fast_dev_run" in arguments else 3)
    assert "ends before anything could be measured: it continues unchanged" in caplog.text


def test_a_training_without_time_to_measure_takes_what_is_known_to_help(caplog: pytest.LogCaptureFixture) -> None:
    for origin in ("the training is too short to time them, kept in", "remembered"):
        trainer = quiet(speed="auto", max_epochs=2, limit_train_batches=4)
        trainer.fit(Classifier(), loader())
        assert f"fused_optimizer=True) ({origin}" in caplog.text
        caplog.clear()


def test_what_cannot_be_sent_to_other_processes_keeps_what_was_found_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("Trainer.advise: the model cannot be sent")

    monkeypatch.setattr(auto, "measure", fails)
    # As if the training were long.
    monkeypatch.setattr(auto, "PLAN", Plan())
    trainer = quiet(speed="auto", max_epochs=10)
    with pytest.warns(UserWarning, match="what was measured before is used: the model cannot be sent"):
        trainer.fit(planted.Sleeper(0.0), loader())
    assert trainer.chosen_levers == ("resident data", "fused optimizer")
    assert "more speed-ups help; training begins after that" in caplog.text


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured")


# -- measured in processes


@pytest.fixture
def _planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    length = Lever("by length", 'L.Trainer(..., batching="length")', Safety.OTHER_BATCHES, change=planted.sleep_never)
    for lever in (planted.LIAR, Lever("halved", "halved()", Safety.ROUNDING, change=planted.halve), length):
        levers.register(lever)
    added = [levers.choose([name])[0] for name in ("liar", "halved", "by length")]
    monkeypatch.setattr(auto, "PLAN", Plan(rounds=1, steps=2, warm_up=1))
    monkeypatch.setattr(auto, "known_levers", lambda: added)
    yield
    for lever in added:
        levers.unregister(lever.name)


@pytest.mark.slow
@pytest.mark.usefixtures("_planted", "one_fork_server")
def test_auto_switches_on_what_wins_remembers_it_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = planted.Sleeper()
    model = copy.deepcopy(plain)
    for each, arguments in ((plain, {}), (model, {"speed": "auto"})):
        L.seed_everything(1, verbose=False)
        quiet(max_epochs=1, **arguments).fit(each, loader())
    # Only the right one is on, and measuring changed nothing else.
    assert model.nap_seconds == planted.NAP_SECONDS / 2
    assert same_weights(plain, model)
    assert "which of 2 more speed-ups help" in caplog.text
    assert "with halved() (measured in" in caplog.text
    assert (
        "speed='auto' leaves out what changes more than rounding and random draws: batching=\"length\" "
        "(same samples in other batches)"
    ) in caplog.text

    with monkeypatch.context() as patch:
        patch.setattr(auto, "measure", never)
        caplog.clear()
        quiet(speed="auto").fit(model := planted.Sleeper(), loader())
        assert model.nap_seconds == planted.NAP_SECONDS / 2
        assert "with halved() (remembered)" in caplog.text
        (kept,) = (tmp_path / "cache" / "advice").iterdir()
        kept.write_text("{half")
        # What is damaged is measured again.
        with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(AssertionError, match="measured"):
            quiet(speed="auto").fit(planted.Sleeper(), loader())


# -- what may be switched on


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("atuo", "speed"),
        ("exakt", "speed"),
        ("lower precison", "speed"),
        ("changes the maths", "speed"),
        (True, "speed"),
    ],
)
def test_other_words_are_refused_with_the_nearest(value: Any, argument: str) -> None:
    with refused((ValueError, TypeError), argument):
        quiet(speed=value)


def test_every_class_but_the_last_can_be_asked_for() -> None:
    assert set(SPEEDS.values()) | {str(Safety.OTHER_MATHS)} == set(map(str, Safety))
    assert all(SPEEDS[str(safety)] == safety for safety in Safety if safety != Safety.OTHER_MATHS)
    assert (Safety.of_speed("exact"), Safety.of_speed("auto")) == (Safety.ROUNDING, Safety.OTHER_DRAWS)


def test_a_full_verdict_serves_every_class() -> None:
    lines = [
        Line(Safety.SAME_BITS, "a", ["resident data"], 1.2),
        Line(Safety.ROUNDING, "b", ["resident data", "fused optimizer"], 1.5),
        Line(Safety.OTHER_DRAWS, "c", ["resident data", "fused optimizer", "fast dropout masks"], 2.0),
    ]
    keep(lines[-1].levers, model := Watches(dropout=0.5), lines=lines)
    chosen = []
    for speed in ("same bits", "exact", "auto", "lower precision"):
        trainer = quiet(speed=speed)
        trainer.fit(model, loader())
        chosen.append(list(trainer.chosen_levers or ()))
    assert chosen == [*(line.levers for line in lines), lines[-1].levers]


def test_exact_trains_the_same_up_to_rounding_and_measuring_changes_nothing() -> None:
    models = []
    for arguments in ({}, {"speed": "exact"}, {"resident": True, "fused_optimizer": True}):
        L.seed_everything(3, verbose=False)
        model = Watches(dropout=0.3)
        generator = torch.Generator().manual_seed(5)
        # Long enough for steps to be timed, with an order that the loader's own generator draws.
        quiet(max_epochs=20, **arguments).fit(model, loader(shuffle=True, generator=generator))
        models.append(model)
    plain, exact, by_hand = models
    assert exact.arguments["fused_optimizer"] is True
    # The random numbers, the order and the weights are those of a run that measured nothing.
    assert same_weights(exact, by_hand)
    for name, value in plain.state_dict().items():
        # Rounding grows over 200 steps with momentum.
        torch.testing.assert_close(exact.state_dict()[name], value, rtol=0.0, atol=2e-3)


def test_what_is_written_by_hand_stays() -> None:
    # Measured at first, then remembered.
    for _ in range(2):
        trainer = quiet(speed="auto", fused_optimizer=False, max_epochs=3)
        trainer.fit(Watches(), loader())
        assert trainer.given_arguments["fused_optimizer"] is False
        assert trainer.chosen_levers == ("resident data",)
    quiet(speed="auto", max_epochs=3).fit(Watches(), loader())


def test_a_second_run_starts_at_once_and_a_damaged_file_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit() -> Any:
        trainer = quiet(speed="auto", max_epochs=3)
        trainer.fit(Watches(), loader())
        return trainer.chosen_levers

    first = fit()
    with monkeypatch.context() as patch:
        patch.setattr(auto, "FirstChoice", never)
        assert fit() == first
    assert "(remembered)" in caplog.text
    (kept,) = (tmp_path / "cache" / "advice").iterdir()
    kept.write_text("{half")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert fit() == first


def test_other_data_and_another_class_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(speed="auto", max_epochs=3).fit(Watches(), loader())
    monkeypatch.setattr(auto, "FirstChoice", never)
    for speed, data in (("exact", loader()), ("auto", loader(batch_size=8)), ("auto", loader(400))):
        with pytest.raises(AssertionError, match="measured"):
            quiet(speed=speed, max_epochs=3).fit(Watches(), data)


def test_a_resumed_run_has_the_levers_of_the_run_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    L.seed_everything(0, verbose=False)
    whole = Watches()
    start = copy.deepcopy(whole)
    trainer = quiet(speed="auto", max_epochs=4)
    trainer.fit(whole, loader())
    first = quiet(speed="auto", max_epochs=2)
    first.fit(start, loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    # On a machine that remembers nothing, and would measure something else.
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(auto, "FirstChoice", never)
    resumed = Watches()
    second = quiet(speed="auto", max_epochs=4)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert second.chosen_levers == first.chosen_levers == ("resident data", "fused optimizer")
    assert same_weights(resumed, whole)
    assert "(as in the run that this one continues)" in caplog.text


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(0)
        for _ in range(80):
            yield torch.randn(8, generator=numbers), 1


def test_a_training_without_a_known_end_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure", never)
    trainer = quiet(speed="auto")
    trainer.fit(Watches(), torch.utils.data.DataLoader(Endless(), batch_size=4))
    assert trainer.global_step == 20
    assert trainer.chosen_levers is not None
