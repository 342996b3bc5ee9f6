"""Several calls of one packed stack in one step: recomputation in backward belongs to the right call."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten.memory import recomputed
from hasten.packed.blocks import packed_blocks
from hasten.packed.layout import Layout
from tests.models import quiet
from tests.packed.test_blocks import (
    WIDTH,
    Reader,
    assert_same_weights,
    batch_of,
    loader,
    logits_and_gradients,
    model_of,
)
from tests.refusals import refused

# As many tokens in all: what is mixed up fails by its numbers, not by its shapes.
ONE, OTHER = [7, 3, WIDTH, 1], [2, 9, 4, 8]


class Twins(Reader):
    """One encoder for two texts a sample, the second of which is padded otherwise; both first tokens are compared."""

    def embed(self, ids: Tensor, real: Tensor) -> Tensor:
        return self.encoder(self.words(ids), src_key_padding_mask=~real)[:, 0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        other = real.roll(1, 0) | (torch.arange(WIDTH) < 4)
        likeness = self.embed(ids, real) * self.embed(ids.flip(0) + 1, other)
        loss = nn.functional.cross_entropy(self.head(likeness), batch["labels"])
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize(("packed", "memory"), [(True, "selective"), ("first_token", "full")])
def test_an_encoder_used_twice_in_a_step_is_computed_again_as_it_was(packed: Any, memory: str) -> None:
    kept, again = Twins(), Twins()
    quiet(max_epochs=2, packed=packed).fit(kept, loader())
    quiet(max_epochs=2, packed=packed, memory=memory).fit(again, loader())
    assert again.losses == pytest.approx(kept.losses, abs=1e-6)
    assert_same_weights(again, kept)


def gradients_of_two_calls(model: Any) -> list[Tensor]:
    model.zero_grad()
    first, second = (model(**batch_of(lengths)).last_hidden_state[:, 0] for lengths in (ONE, OTHER))
    (first * second).sin().sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize(
    ("how", "first_token"),
    [
        ("full", False),
        ("selective", True),
        ("model's own", False),
        ("model's own, later", True),
        ("reentrant", False),
    ],
)
def test_a_bert_called_twice_in_a_step_is_computed_again_as_it_was(how: str, first_token: bool) -> None:
    model = model_of("bert").bert
    exact = gradients_of_two_calls(model)
    own = {"use_reentrant": how == "reentrant"}
    with ExitStack() as changed:
        if how in ("model's own", "reentrant"):
            model.gradient_checkpointing_enable(own)
        changed.enter_context(packed_blocks(model, first_token=first_token))
        if how in ("full", "selective"):
            changed.enter_context(recomputed(model, how))
        elif how == "model's own, later":
            model.gradient_checkpointing_enable(own)
        for _ in range(2):
            for one, other in zip(gradients_of_two_calls(model), exact, strict=True):
                torch.testing.assert_close(one, other)
    model.gradient_checkpointing_disable()
    assert not any(type(each).__module__.startswith("hasten") for one in model.modules() for each in vars(one).values())


@pytest.mark.parametrize("name", ["bert", "torch"])
def test_a_checkpointing_that_loses_the_call_is_refused_not_guessed(name: str) -> None:
    model = model_of("bert") if name == "bert" else Reader()
    batch = batch_of(ONE)
    with recomputed(model, "full"), packed_blocks(model):
        if isinstance(model, Reader):
            words, padding = model.words(batch["input_ids"]), ~batch["attention_mask"].bool()
            loss = model.encoder(words, src_key_padding_mask=padding)[~padding].sum()
        else:
            loss = model(**batch).logits.sum()
        with refused(MisconfigurationException, "packed", fix="memory='full'"):
            loss.backward()


def test_an_encoder_that_is_padded_in_evaluation_is_computed_again_padded() -> None:
    model = Reader().eval()
    batch = batch_of(ONE)
    real = batch["attention_mask"].bool()

    def gradients() -> Any:
        hidden = model.encoder(model.words(batch["input_ids"]), src_key_padding_mask=~real)
        return torch.autograd.grad((hidden * real[..., None]).sin().sum(), list(model.encoder.parameters()))

    exact = gradients()
    with packed_blocks(model), recomputed(model, "full"):
        for one, other in zip(gradients(), exact, strict=True):
            torch.testing.assert_close(one, other)


def test_a_block_called_by_itself_is_computed_as_it_is() -> None:
    model = Reader().train()
    words = torch.randn(2, WIDTH, 16)
    exact = model.encoder.layers[0](words)
    with packed_blocks(model):
        model.encoder(words)
        torch.testing.assert_close(model.encoder.layers[0](words), exact)


def test_a_call_that_fails_leaves_no_trace_in_the_next() -> None:
    model, batch = model_of("bert"), batch_of(ONE)
    exact, _ = logits_and_gradients(model, batch)
    with packed_blocks(model):
        with pytest.raises(IndexError):
            model(**batch_of(OTHER), token_type_ids=torch.full((4, WIDTH), 99))
        again, _ = logits_and_gradients(model, batch)
    torch.testing.assert_close(again, exact)


def test_what_a_call_held_is_freed_without_a_backward() -> None:
    model, batch = model_of("bert"), batch_of(ONE)
    with packed_blocks(model, first_token=True), recomputed(model, "full"):
        model(**batch)
        gc.collect()
        assert not any(isinstance(one, Layout) for one in gc.get_objects())
