"""The classes of levers: what each may change is measured, what speed="auto" may switch on, and what the docs say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.commands import main
from hasten.speed import auto, levers, live, look, remembered
from hasten.speed.advice import Advice, Line, Row
from hasten.speed.apart import why_not_apart
from hasten.speed.levers import LEVERS, Lever, choose
from hasten.speed.safety import Safety
from tests.models import Classifier, loader, quiet
from tests.speed import planted

DOCS = Path(__file__).resolve().parents[2] / "docs" / "speed.md"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "_may_fork", lambda: True)
    # Trials are copies of this process: large products would take most of their time.
    monkeypatch.setattr(look, "measured_peaks", lambda device: {})
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


def advise(model: Any, given: Any) -> Advice:
    found: Advice = quiet(max_epochs=50).advise(
        model, planted.texts(), levers=given, rounds=1, steps=3, warm_up=1, combine=False, verbose=False
    )
    return found


def test_a_lever_is_wrong_where_it_does_more_than_its_class_allows() -> None:
    leaks = [planted.leaking(each) for each in (Safety.ROUNDING, Safety.OTHER_BATCHES, Safety.OTHER_DRAWS)]
    gradients = Lever("gradients", "gradients()", Safety.ROUNDING, change=planted.change_gradients)
    # Steps that sleep are not given up as too slow, however busy the machine is.
    found = advise(planted.Texts(), [*leaks, gradients, "batches by length"])
    rows = {row.name: row for row in found.rows}
    by_length = rows.pop("batches by length")
    assert {row.verdict for row in rows.values()} == {"wrong"}, found.table()
    assert "is" in rows["leak: same maths up to rounding"].reason
    for name in ("leak: same samples in other batches", "leak: other random draws"):
        assert "with it the samples of a batch affect one another" in rows[name].reason
    assert "the gradients of step 1 are" in rows["gradients"].reason
    # Its losses alone would not have said it.
    assert (rows["gradients"].loss_deviation or 0.0) < (rows["gradients"].loss_noise or 0.0)
    assert by_length.speed is not None
    assert by_length.verdict not in ("wrong", "refused")
    assert (found.facts["step_draws"], found.facts["samples_draw"]) == (False, False)


def test_a_leak_is_found_beside_dropout_too() -> None:
    model = planted.Texts()
    # Where no module tells of it.
    model.of_texts = lambda batch, of=model.of_texts: nn.functional.dropout(of(batch), 0.3)  # type: ignore[misc]
    lever = planted.leaking(Safety.ROUNDING, redraws="step")
    found = advise(model, [lever])
    (row,) = found.rows
    assert found.facts["step_draws"] is True
    assert (row.safety, row.verdict) == (Safety.OTHER_DRAWS, "wrong"), found.table()
    assert "without dropout" in row.reason


def test_other_batches_are_refused_where_samples_affect_one_another() -> None:
    row = advise(planted.Leaking(0.0), ["batches by length"]).row("batches by length")
    assert row.verdict == "refused"
    assert "affect one another in this model" in row.reason


class Sums(planted.Texts):
    """Its loss is a sum over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return len(batch["y"]) * super().training_step(batch, batch_idx)


class OfTokens(planted.Texts):
    """Its loss is a mean over tokens: longer texts weigh more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = batch["attention_mask"]
        logits = self.layer(self.embedding(batch["input_ids"]))
        each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["input_ids"] % 2, reduction="none")
        return {"loss": (each * mask).sum() / mask.sum()}


class Contrastive(planted.Texts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        texts = self.of_texts(batch)
        return nn.functional.cross_entropy(texts @ texts.T, torch.arange(len(texts)))


class Normalizing(planted.Texts):
    def __init__(self, nap_seconds: float = 0.0) -> None:
        super().__init__(nap_seconds)
        self.norm = nn.BatchNorm1d(8)

    def of_texts(self, batch: Any) -> Any:
        return self.norm(super().of_texts(batch))


@pytest.mark.parametrize(
    ("make", "apart"),
    [
        (planted.Texts, True),
        (lambda nap: planted.Texts(nap, dropout=0.5), True),
        (Sums, True),
        (OfTokens, True),
        (planted.Leaking, False),
        (planted.Padded, False),
        (Contrastive, False),
        (Normalizing, False),
    ],
)
def test_samples_are_apart_where_a_batch_has_the_gradients_of_its_samples(make: Any, apart: bool) -> None:
    torch.manual_seed(1)
    module = make(0.0)
    batch = next(iter(planted.texts()))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    numbers = torch.get_rng_state()
    assert (why_not_apart(module, [batch], coarse=False) is None) == apart
    # Nothing of the look is left.
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "log" not in module.__dict__


# -- the class of a lever in a program


def test_what_draws_is_in_another_class_in_a_program_that_draws() -> None:
    found = {
        draws: {
            lever.name: lever.safety_in({"step_draws": draws, "samples_draw": draws, "batch_norm": draws})
            for lever in LEVERS
        }
        for draws in (False, True)
    }
    changed = {name for name in found[True] if found[True][name] != found[False][name]}
    assert changed == {
        *("loader workers", "packed tokens", "packed first token"),
        *("compile", "compile by blocks", "CUDA graphs", "micro-batches"),
    }
    assert {name for name, safety in found[True].items() if safety.is_automatic} == {
        *("kept memory", "tcmalloc", "jemalloc", "resident data", "data on the device", "fused optimizer"),
        *("one thread", "half the threads", "a thread a core", "recomputed activations"),
    }


@pytest.mark.parametrize(
    ("safety", "redraws", "text"),
    [
        ("rounding", "", "use one of 'same bits', 'same maths"),
        (Safety.ROUNDING, "all", "use 'step', 'samples'"),
    ],
)
def test_unknown_classes_are_refused(safety: Any, redraws: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Lever("x", "x()", safety, change=planted.halve, redraws=redraws)


# -- Trainer(speed="auto")


@pytest.fixture
def _planted() -> Iterator[None]:
    given = [
        Lever("quick", "quick()", Safety.ROUNDING, change=planted.halve),
        Lever("other", 'L.Trainer(..., batching="length")', Safety.OTHER_BATCHES, change=planted.sleep_never),
        Lever(
            "low",
            'L.Trainer(..., precision="bf16-mixed")',
            Safety.LOWER_PRECISION,
            change=planted.sleep_never,
        ),
    ]
    for lever in given:
        levers.register(lever)
    yield
    for lever in given:
        levers.unregister(lever.name)


@pytest.mark.usefixtures("_planted")
def test_auto_measures_and_switches_on_rounding_at_most_and_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(auto, "PLAN", auto.Plan(rounds=2, steps=3, warm_up=1, consent=False))
    monkeypatch.setattr(auto, "known_levers", lambda: list(levers._registered))
    model = planted.Sleeper()
    quiet(speed="auto", max_epochs=1).fit(model, loader())
    assert model.nap_seconds == planted.NAP_SECONDS / 2
    assert "measuring" in caplog.text
    assert "which of 1 levers pay" in caplog.text
    assert (
        "speed='auto' leaves out what changes more than rounding: batching=\"length\" (same samples in other "
        'batches), precision="bf16-mixed" (lower precision).'
    ) in caplog.text


def test_auto_takes_of_a_full_verdict_what_it_promises(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = Classifier()
    key = look.key_of(quiet(speed="auto")._given, model, torch.device("cpu"))
    lines = [
        Line(Safety.ROUNDING, "fused()", ["fused optimizer"], 1.5),
        Line(Safety.OTHER_BATCHES, "fused() and length()", ["fused optimizer", "batches by length"], 3.0),
    ]
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
    # As an older version, or somebody by hand, may have written it.
    winners = ["fused optimizer", "batches by length", "bf16 autocast", "compile"]
    facts = {"step_draws": True}
    advice = Advice("train.py", unchanged, [], lines=lines, winners=winners, facts=facts)
    assert remembered.remember(key, advice) is not None
    assert remembered.recall(key) == advice
    trainer = quiet(speed="auto")
    trainer.fit(model, loader())
    speed = trainer._arguments.speed
    assert (speed.fused_optimizer, speed.batching, speed.compile) == (True, None, None)
    assert "speed='auto': L.Trainer(..., fused_optimizer=True) (remembered)" in caplog.text
    assert "Measured were 3.00x with fused() and length() (same samples in other batches)" in caplog.text


def test_what_needs_consent_is_written_after_what_does_not() -> None:
    lines = [
        Line(Safety.SAME_BITS, "a()", ["a"], 1.2),
        Line(Safety.OTHER_BATCHES, "a(); b()", ["a", "b"], 2.0),
    ]
    advice = Advice(
        "train.py", Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0), [], lines=lines
    )
    assert (advice.line, repr(advice)) == ("a()", "<Advice on train.py: 1.20x with a()>")
    assert advice.table().splitlines()[-4:] == [
        "  1.20x same bits:",
        "      a()",
        "  2.00x same samples in other batches: needs consent:",
        "      a(); b()",
    ]


# -- the documentation and the command line


def test_the_documentation_has_the_classes_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for safety in Safety:
        consent = "yes" if safety.is_automatic else "no"
        assert f"| {safety} | {safety.means.removesuffix('.')} | {consent} |" in text
    rows = dict(re.findall(r"^\| `Trainer\((.*?)\)`.*?\|.*?\|.*\| ([^|]+) \|$", text, re.MULTILINE))
    checked = set()
    for lever in LEVERS:
        argument = ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
            for name, value in lever.arguments.items()
        )
        if argument in rows:
            worse = lever.safety_in({})
            expected = (
                str(lever.safety)
                if worse in (lever.safety, Safety.OTHER_MATHS)
                else f"{lever.safety}; {worse}"
            )
            assert rows[argument].startswith(expected), (lever.name, rows[argument])
            checked.add(lever.name)
    assert {
        "fused optimizer",
        "batches by length",
        "compile",
        "bf16 autocast",
        "fp8",
        "resident data",
    } <= checked
    assert len(checked) >= 13


def test_the_command_line_lists_levers_with_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--list"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^batches by length +same samples in other batches +L.Trainer", shown, re.MULTILINE)
    assert "lower precision: needs consent: products are computed with fewer bits." in shown


def test_every_lever_is_found_by_its_name() -> None:
    assert [lever.safety for lever in choose(["batching", "bf16 autocast"])] == [
        Safety.OTHER_BATCHES,
        Safety.LOWER_PRECISION,
    ]
