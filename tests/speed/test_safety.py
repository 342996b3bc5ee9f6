"""The classes of speed-ups: what each may change is measured, what speed="auto" may use, and what the docs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten_tools.speed.advice import Advice, Line, Row
from hasten_tools.speed.checks import why_not_apart
from hasten_tools.speed.levers import LEVERS, Lever
from hasten_tools.speed.safety import Safety
from tests.models import quiet
from tests.refusals import refused
from tests.speed import planted

DOCS = Path(__file__).resolve().parents[2] / "docs" / "speed.md"


pytestmark = pytest.mark.usefixtures("one_fork_server")


def advise(model: Any, given: Any) -> Advice:
    found: Advice = quiet(max_epochs=50).advise(
        model, planted.texts(), levers=given, rounds=1, steps=3, warm_up=1, combine=False, verbose=False
    )
    return found


@pytest.mark.slow
def test_a_lever_is_wrong_where_it_does_more_than_its_class_allows() -> None:
    leaks = [planted.leaking(each) for each in (Safety.ROUNDING, Safety.OTHER_BATCHES)]
    gradients = Lever("gradients", "gradients()", Safety.ROUNDING, change=planted.change_gradients)
    found = advise(planted.Texts(), [*leaks, gradients, "batches by length"])
    rows = {row.name: row for row in found.rows}
    by_length = rows.pop("batches by length")
    assert {row.verdict for row in rows.values()} == {"wrong"}, found.table()
    assert "is" in rows["leak: same maths up to rounding"].reason
    reason = rows["leak: same samples in other batches"].reason
    assert "with it the samples of a batch affect one another" in reason
    assert "the gradients of step 1 are" in rows["gradients"].reason
    # Its losses alone would not have said it.
    assert (rows["gradients"].loss_deviation or 0.0) < (rows["gradients"].loss_noise or 0.0)
    assert by_length.verdict not in ("wrong", "refused", "failed")
    assert (by_length.useful_tokens or 0) > 2 * (found.unchanged.useful_tokens or 1)
    assert any("% with batches by length" in note for note in found.notes)
    assert (found.facts["step_draws"], found.facts["samples_draw"]) == (False, False)


@pytest.mark.slow
def test_a_leak_is_found_beside_dropout_too() -> None:
    found = advise(planted.Drawing(), [planted.leaking(Safety.ROUNDING, redraws="step")])
    (row,) = found.rows
    assert found.facts["step_draws"] is True
    assert (row.safety, row.verdict) == (Safety.OTHER_DRAWS, "wrong"), found.table()
    assert "without dropout" in row.reason


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


# -- the class of a speed-up in a program


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
    assert {name for name, safety in found[True].items() if not safety.is_automatic} == {
        *("batches by length", "TF32 products", "bf16 products", "bf16 autocast", "fp8"),
        *("no attention dropout", "micro-batches"),
    }


@pytest.mark.parametrize(
    ("safety", "redraws", "argument"),
    [("rounding", "", "safety"), (Safety.ROUNDING, "all", "redraws")],
)
def test_unknown_classes_are_refused(safety: Any, redraws: str, argument: str) -> None:
    with refused(ValueError, argument):
        Lever("x", "x()", safety, change=planted.halve, redraws=redraws)


# -- what is written


def test_what_needs_consent_is_written_after_what_does_not(tmp_path: Path) -> None:
    lines = [Line(Safety.SAME_BITS, "a()", ["a"], 1.2), Line(Safety.OTHER_BATCHES, "a(); b()", ["a", "b"], 2.0)]
    unchanged = Row("unchanged", "", Safety.SAME_BITS, "reference", speed=1.0)
    # After one turn the interval has no end.
    slow = Row("c", "c()", Safety.SAME_BITS, "slower", speed=0.1, low=0.0, high=float("inf"))
    advice = Advice("train.py", unchanged, [slow], lines=lines)
    assert (advice.line, repr(advice)) == ("a()", "<Advice on train.py: 1.2x with a()>")
    for shown in (advice.summary(), advice.table()):
        assert shown.splitlines()[:4] == [
            "train.py: 1.2x as fast with (same bits)",
            "    a()",
            "2.0x as fast with (same samples in other batches: needs consent)",
            "    a(); b()",
        ]
    assert Advice.from_json(advice.to_json()) == advice
    assert advice.draw(tmp_path / "chart.png").stat().st_size > 1000


# -- the documentation


def test_the_documentation_has_the_classes_of_the_code() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for safety in Safety:
        consent = "yes" if safety.is_automatic else f'with `speed="{safety}"`'
        consent = "never" if safety is Safety.OTHER_MATHS else consent
        assert f"| {safety} | {safety.means.removesuffix('.')} | {consent} |" in text
    rows = dict(re.findall(r"^\| \[`Trainer\((.*?)\)`.*?\|.*?\|.*\| ([^|]+) \|$", text, re.MULTILINE))
    checked = set()
    for lever in LEVERS:
        argument = ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
            for name, value in lever.arguments.items()
        )
        if argument in rows:
            worse = lever.safety_in({})
            expected = str(lever.safety) if worse in (lever.safety, Safety.OTHER_MATHS) else f"{lever.safety}; {worse}"
            assert rows[argument].startswith(expected), (lever.name, rows[argument])
            checked.add(lever.name)
    assert {"fused optimizer", "batches by length", "compile", "bf16 autocast", "fp8", "resident data"} <= checked
    assert len(checked) >= 13
