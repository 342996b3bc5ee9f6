"""Copies of a model that is packed at the moment: models of their own, padded, now and later."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.memory import recomputed
from hasten.packed.blocks import packed_blocks
from tests.packed.test_blocks import WIDTH, Reader, batch_of, model_of, trained_both_ways

BATCH = batch_of([7, 3, WIDTH, 1])


def output_of(model: Any) -> Tensor:
    if isinstance(model, Reader):
        real = BATCH["attention_mask"].bool()
        hidden = model.encoder(model.words(BATCH["input_ids"]), src_key_padding_mask=~real)
        return hidden * real[..., None]
    return model(**BATCH).logits


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": saved_and_loaded,
}


@pytest.mark.parametrize(
    ("name", "way", "lever"),
    [
        *((name, way, None) for name in ("bert", "torch") for way in COPIES),
        ("bert", "pickled", "first_token"),
        ("bert", "copied", "memory"),
        ("torch", "pickled", "memory"),
        # transformers adds a local function then, which cannot be pickled.
        ("bert", "copied", "checkpointing"),
    ],
)
def test_a_copy_of_a_packed_model_computes_with_its_own_weights(name: str, way: str, lever: str | None) -> None:
    model = Reader() if name == "torch" else model_of(name)
    exact = output_of(model)
    if lever == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with packed_blocks(model, first_token=lever == "first_token"):
        with recomputed(model, "full") if lever == "memory" else nullcontext():
            output_of(model)
            made = COPIES[way](model)
        during = output_of(made)
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        torch.testing.assert_close(output_of(made), exact)
    torch.testing.assert_close(during, exact)
    torch.testing.assert_close(output_of(made), exact)
    # All of its parameters learn; the original is not touched.
    output_of(made).square().sum().backward()
    inner = made.encoder if name == "torch" else made.bert.encoder
    assert all(one.grad is not None for one in inner.parameters())
    assert all(one.grad is None for one in model.parameters())
    again = COPIES[way](made)
    torch.testing.assert_close(output_of(again), exact)


def test_the_copy_of_a_packed_configuration_names_the_attention_of_before() -> None:
    model = model_of("bert")
    before = model.config._attn_implementation
    with packed_blocks(model), packed_blocks(model_of("gpt2")):
        made = copy.deepcopy(model)
        assert made.config._attn_implementation == before == copy.deepcopy(model.config)._attn_implementation
        assert type(made.config._attn_implementation) is str
    assert model.config._attn_implementation == before


def test_a_copy_can_be_packed_itself() -> None:
    for model in (model_of("bert"), Reader()):
        exact = output_of(model)
        with packed_blocks(model):
            made = copy.deepcopy(model)
            with packed_blocks(made):
                torch.testing.assert_close(output_of(made), output_of(model))
        torch.testing.assert_close(output_of(made), exact)


class Taught(Reader):
    """Learns to agree with a slow copy of its encoder, which is made in the middle of the run."""

    teacher: nn.Module | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        real = batch["attention_mask"].bool()
        words = self.words(batch["input_ids"])
        if self.teacher is None:
            # Not setattr: a teacher is no part of the module, and not trained.
            self.__dict__["teacher"] = copy.deepcopy(self.encoder)
        assert self.teacher is not None
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            told = self.teacher(words, src_key_padding_mask=~real)
        hidden = self.encoder(words, src_key_padding_mask=~real)
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        loss = nn.functional.cross_entropy(self.head(mean), batch["labels"])
        loss = loss + ((hidden - told) * real[..., None]).square().mean()
        self.losses.append(loss.item())
        return loss


def test_a_teacher_copied_in_the_middle_of_a_run_teaches_the_same() -> None:
    trained_both_ways(Taught, epochs=3)
