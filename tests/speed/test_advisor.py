"""The advisor on a model in hand: its verdicts, and that nothing of it is left."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.flop_counter

import hasten as L
from hasten._lib.errors import MisconfigurationException
from hasten.seed import collect_rng_state
from hasten.speed import changes, levers, live, race, remembered
from hasten.speed.advice import Advice
from hasten.speed.figures import figures
from hasten.speed.levers import Lever, choose
from hasten.speed.plan import Plan
from hasten.speed.safety import Safety
from tests.models import Classifier, loader, quiet, same_weights
from tests.speed import planted


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what torch imports late, once, and not in every copy of this process."""
    quiet(limit_train_batches=1).fit(Classifier(), loader())


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let trials be copies of this process, whatever threads other tests left; keep no verdict."""
    monkeypatch.setattr(live, "_may_fork", lambda: True)
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def advise(model: Any, given: Any, **options: Any) -> Advice:
    options = {"rounds": 2, "steps": 3, "warm_up": 1, "verbose": False, **options}
    found: Advice = quiet(max_epochs=5).advise(model, loader(shuffle=True), levers=given, **options)
    return found


def children() -> set[int]:
    """Return the processes that this one started and that are still there, as zombies too."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


def test_planted_levers_get_their_verdicts_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, before = planted.Sleeper(), set(children())
    weights, state = copy.deepcopy(model.layer), collect_rng_state()
    given = [planted.SLOW, planted.QUICK, planted.LIAR, planted.NAN, planted.REFUSING, planted.DYING]

    found = advise(model, given)

    assert {row.name: row.verdict for row in found.rows} == {
        "slow": "slower",
        "quick": "wins",
        "liar": "wrong",
        "nan": "wrong",
        "refusing": "refused",
        "dying": "failed",
    }
    assert found.row("refusing").reason == "not with this model: use another"
    assert "SIGKILL" in found.row("dying").reason
    # Fast and wrong is no gain.
    assert (found.row("liar").speed or 0) > 1.5
    assert (found.winners, found.line) == (["quick"], "quick()")
    assert (found.row("quick").speed or 0) > 3 > 0.5 > (found.row("slow").speed or 1)
    assert "slow: slower: " in found.table()

    assert children() == before
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []
    assert same_weights(model.layer, weights)
    after = collect_rng_state()
    assert (after["python"], after["torch"]) == (state["python"], state["torch"])
    assert model._trainer is None
    assert model.nap_seconds == planted.NAP_SECONDS


def test_winners_are_combined_and_the_safest_line_comes_first() -> None:
    asks = Lever("asks", "asks()", Safety.OTHER_MATHS, change=planted.sleep_never)
    halved = Lever("halved", "halved()", Safety.SAME_BITS, change="tests.speed.planted:halve")
    found = advise(planted.Sleeper(), [asks, halved, planted.SLOW])
    assert [line.line for line in found.lines] == ["halved()", "halved(); asks()"]
    assert found.lines[0].speed < found.lines[1].speed
    # What needs consent is shown, and is not what the best line without it says.
    assert (found.line, found.winners) == ("halved()", ["halved"])
    assert "changes the maths: needs consent" in found.table().splitlines()[-2]


def test_compile_loses_on_a_tiny_model() -> None:
    # The eager backend spares the test a compiler; tracing alone costs more than ten tiny steps.
    compiled = Lever(
        "compile", "L.Trainer(..., compile=True)", Safety.ROUNDING, {"compile": {"backend": "eager"}}
    )
    model = Classifier()
    model.__dict__["unpicklable"] = lambda: None
    found = advise(model, [compiled])
    assert not found.row("compile").wins, found.table()
    assert found.row("compile").verdict in ("slower", "no gain", "unclear", "pays back too late"), (
        found.table()
    )
    assert found.line == ""
    # On a busy machine it may look faster for once, and is not believed.
    unclear = found.row("compile").verdict == "unclear"
    assert ("Nothing is known to pay" if unclear else "Nothing pays here: leave the program") in found.table()


def test_a_lever_that_pays_back_after_the_training_has_ended_does_not_win() -> None:
    # 1.5 s once, 10 ms won a step: 150 steps, and the training has 50.
    found = advise(planted.Sleeper(), [planted.LATE])
    row = found.row("late")
    assert row.verdict == "pays back too late", found.table()
    assert (row.break_even_steps or 0) > 50
    assert "this training has 50" in row.reason
    assert found.lines == []


def test_what_is_on_or_cannot_pay_is_not_measured() -> None:
    trainer = quiet(fused_optimizer=True)
    found = trainer.advise(
        planted.Sleeper(0.0),
        loader(),
        levers=["fused optimizer", "TF32 products", "packed tokens", "no attention dropout"],
        rounds=1,
        steps=2,
        warm_up=1,
        verbose=False,
    )
    assert [row.verdict for row in found.rows] == ["already on", "not here", "not here", "not here"]
    assert "Sleeper holds no transformer" in found.row("packed tokens").reason
    assert found.winners == []
    assert found.combinations == []


def test_the_data_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    masked = [
        {
            "x": torch.randn(4, 8),
            "attention_mask": torch.tensor([[1, 1, 0, 0]] * 4),
            "y": torch.zeros(4).long(),
        }
    ]
    found = quiet(max_epochs=5).advise(
        planted.Masked(), masked, levers=[planted.QUICK], rounds=1, steps=3, warm_up=1, combine=False
    )
    assert found.facts["useful_tokens"] == 0.5
    assert found.facts["flops_per_step"] > 0
    assert found.unchanged.mfu is not None
    assert found.unchanged.samples_per_second is not None
    assert found.parts["forward"] > 0.5 * sum(found.parts.values())
    shown = capsys.readouterr().out
    assert "Useful tokens: 50%" in shown
    assert "\x1b" not in shown


def texts() -> Any:
    """Return a loader of 64 short and long texts, padded to 32 tokens: 14 % of them are text."""
    lengths = torch.tensor([2] * 56 + [22] * 8)
    mask = (torch.arange(32) < lengths[:, None]).long()
    data = [
        {"x": torch.randn(8), "input_ids": row * 7, "attention_mask": row, "y": torch.tensor(0)}
        for row in mask
    ]
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)


def test_padding_that_a_lever_leaves_out_is_counted_and_costs_are_those_of_useful_tokens() -> None:
    trainer = quiet(max_epochs=50)
    found = trainer.advise(
        planted.Masked(), texts(), levers=["batches by length"], rounds=3, steps=8, warm_up=1, verbose=False
    )
    unchanged, row = found.unchanged, found.row("batches by length")
    assert unchanged.useful_tokens == pytest.approx(4.5 / 32, abs=0.02)
    assert (row.useful_tokens or 0) > 2 * (unchanged.useful_tokens or 1)
    assert any("% with batches by length" in note for note in found.notes)
    # Steps that sleep cost the same however short their texts are, and epochs have as many of them.
    assert 0.6 < (row.speed or 0) < 1.7, found.table()
    assert row.loss_deviation is not None


def test_what_takes_many_times_as_long_is_given_up_after_one_turn() -> None:
    given_up, kept = planted.variants([0.1, 0.1, 0.1], [1.0]), planted.variants([0.1, 0.1], [0.3, 0.3])
    assert [len(costs) for costs in race.costs(*given_up)] == [1, 1]
    assert race.costs(*kept) == ([0.05, 0.05], [0.15, 0.15])
    crawl = Lever("crawl", "crawl()", Safety.SAME_BITS, change=planted.sleep_much_more)
    found = advise(planted.Sleeper(0.01), [crawl], rounds=3, combine=False)
    assert found.row("crawl").verdict == "slower"
    # 3 turns of 3 steps would have given the quartiles of three.
    assert found.row("crawl").low == found.row("crawl").speed == found.row("crawl").high


def test_a_share_above_the_peak_is_not_shown() -> None:
    (variant,) = planted.variants([0.1])
    variant.turns[0].samples = 10
    facts = {
        "flops_per_step": 100,
        "samples_counted": 1,
        "peak_flops": {"float32": 20_000.0, "bfloat16": 5_000.0},
    }
    assert figures(variant, facts, {}, None)["mfu"] == pytest.approx(0.5)
    # Others had the device while its peak was measured.
    assert figures(variant, facts, {"precision": "'bf16-mixed'"}, None)["mfu"] is None


def test_a_budget_that_the_first_look_spends_measures_nothing() -> None:
    every = [Lever(f"halved {n}", "halved()", Safety.SAME_BITS, change=planted.halve) for n in range(3)]
    found = advise(planted.Sleeper(), every, budget_seconds=0.01, rounds=3, steps=5, warm_up=2)
    assert {row.verdict for row in found.rows} == {"no time"}
    assert found.unchanged.step_seconds is not None
    assert (found.combinations, found.lines) == ([], [])
    assert "no time" in found.table()


def test_a_batch_that_does_not_fit_is_measured_in_parts() -> None:
    found = advise(planted.Hungry(), ["micro-batches", planted.QUICK])
    assert found.row("micro-batches").verdict == "needed"
    assert found.row("quick").verdict == "wins", found.table()
    assert found.facts["memory_ran_out"]
    assert found.line == 'L.Trainer(..., micro_batch="auto"); quick()'
    assert found.winners == ["micro-batches", "quick"]
    assert found.arguments == {"micro_batch": "auto"}


def test_a_trial_writes_to_no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "file_of", lambda name: f"/lib/{name}.so")
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    found = race.environment("/scratch", "jemalloc")
    assert {found[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "HASTEN_CACHE", "TMPDIR")} == {
        "/scratch/inductor",
        "/scratch/cache",
        "/scratch",
    }
    assert found["LD_PRELOAD"] == "/lib/jemalloc.so /lib/other.so"


def test_data_that_cannot_be_sent_names_itself_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_may_fork", lambda: False)
    with pytest.raises(TypeError, match=r"the model cannot be sent.*hasten advise program\.py"):
        advise(planted.Sleeper(), ["compile"])


def test_a_broken_program_says_why_before_any_lever_is_measured() -> None:
    with pytest.raises(RuntimeError, match="cannot be measured: KeyError: 'no such column'"):
        advise(planted.Broken(), ["compile"])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"given": ["compil"]}, ValueError, "Did you mean 'compile'"),
        ({"given": [3]}, TypeError, "names of levers"),
        ({"given": [planted.SLOW, planted.SLOW]}, ValueError, "twice"),
        ({"given": ["compile"], "rounds": 0}, ValueError, "rounds=0"),
        (
            {"given": [Lever("l", "l", Safety.ROUNDING, change=lambda *_: None)]},
            ValueError,
            "top of a module",
        ),
    ],
)
def test_wrong_use_is_told_before_anything_starts(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        advise(planted.Sleeper(), **options)


def test_attention_dropout_is_found_and_taken_off_alone() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.1)
    assert [name for _, name in changes.attention_dropouts(layer)] == ["dropout"]
    changes.no_attention_dropout(layer)
    assert layer.self_attn.dropout == 0.0
    assert layer.dropout.p == 0.1


def test_the_name_of_an_argument_stands_for_its_levers() -> None:
    assert [lever.name for lever in choose(["fused_optimizer"])] == ["fused optimizer"]
    assert [lever.name for lever in choose(["packed", "allocator"])][:2] == [
        "packed tokens",
        "packed first token",
    ]
    assert {"kept memory"} <= {lever.name for lever in choose(["allocator"])}


def test_every_lever_has_a_line_a_class_and_known_arguments() -> None:
    from hasten.arguments import SPEED_NAMES

    for lever in choose(None):
        assert set(lever.arguments) <= {*SPEED_NAMES, "precision"}, lever
        assert lever.line
        assert "," not in lever.name  # They are listed with commas between on the command line.
        for name, value in lever.arguments.items():
            assert f"{name}={json.dumps(value) if isinstance(value, str) else value}" in lever.line
        assert all(other in {each.name for each in choose(None)} for other in lever.conflicts)


def test_what_a_training_lacks_is_said_before_a_process_starts() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"advise\(\): there is no data. Pass train_dataloaders"
    ):
        quiet().advise(planted.Sleeper())
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        quiet().advise(torch.nn.Linear(2, 2), loader())  # type: ignore[arg-type]


# -- Trainer(speed="auto")


@pytest.fixture
def _planted() -> Iterator[None]:
    for lever in (planted.QUICK, planted.LIAR, planted.SLOW):
        levers.register(lever)
    yield
    for lever in (planted.QUICK, planted.LIAR, planted.SLOW):
        levers.unregister(lever.name)


def fit_automatically(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    from hasten.speed import auto

    monkeypatch.setattr(auto, "PLAN", auto.Plan(rounds=2, steps=3, warm_up=1, consent=False))
    monkeypatch.setattr(auto, "known_levers", lambda: list(levers._registered))
    quiet(speed="auto", max_epochs=1).fit(model, loader())


@pytest.mark.usefixtures("_planted")
def test_auto_applies_what_wins_says_so_and_remembers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hasten.speed import auto

    caplog.set_level("INFO")
    model = planted.Sleeper()
    fit_automatically(monkeypatch, model)
    # Only the right one is on: the liar and the slow one would have changed it, too.
    assert model.nap_seconds == 0.0
    assert "training_step" not in model.__dict__
    assert "with quick() (measured in" in caplog.text

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(auto, "measure", never)
    caplog.clear()
    fit_automatically(monkeypatch, model := planted.Sleeper())
    assert model.nap_seconds == 0.0
    assert "with quick() (remembered)" in caplog.text


@pytest.mark.usefixtures("_planted")
def test_auto_drops_a_corrupt_verdict_and_measures_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit_automatically(monkeypatch, planted.Sleeper())
    (kept,) = remembered.folder().iterdir()
    kept.write_text("{half")
    with pytest.warns(UserWarning, match="cannot be read"):
        fit_automatically(monkeypatch, model := planted.Sleeper())
    assert model.nap_seconds == 0.0
    assert Advice.from_json(kept.read_text()).winners == ["quick"]


def test_auto_trains_unchanged_where_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_may_fork", lambda: False)
    model = planted.Sleeper(0.0)
    with pytest.warns(UserWarning, match="training goes on unchanged: the model cannot be sent"):
        fit_automatically(monkeypatch, model)
    assert model.layer.weight.grad is not None


def test_auto_does_not_measure_longer_than_it_pays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trainer = quiet(speed="auto", max_epochs=10)
    trainer.fit(planted.Sleeper(0.0), loader())
    assert trainer.global_step >= 20
    assert "measuring for at most 20% of the time it takes" in caplog.text
    assert "this training goes on unchanged: it takes about" in caplog.text
    assert not list(remembered.folder().glob("*"))


def test_auto_gives_the_same_weights_as_without(caplog: pytest.LogCaptureFixture) -> None:
    L.seed_everything(1, verbose=False)
    caplog.set_level("INFO")
    plain = Classifier()
    other = copy.deepcopy(plain)
    quiet().fit(plain, loader())
    # Nothing is registered and nothing known: all that is left is that measuring, here in processes that start from
    # nothing, changes nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.speed.auto.known_levers", list)
        patch.setattr("hasten.speed.auto.PLAN", Plan(rounds=2, steps=3, warm_up=1, consent=False))
        quiet(speed="auto").fit(other, loader())
    assert "nothing pays here" in caplog.text
    assert same_weights(plain, other)
