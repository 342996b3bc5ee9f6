"""Which models of transformers are packed, and which are refused, by what they really do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException
from hasten.packed.blocks import packed_blocks
from tests.packed.test_blocks import WIDTH, WORDS, batch_of

BATCH = batch_of([7, 3, WIDTH, 1])


def model_of(kind: str, head: str = "Model", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this version of transformers has no {kind}")
    small = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**small, **options})
    config.use_cache = False
    return getattr(transformers, f"{kind}{head}")(config).train()


def output_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**BATCH)[0] * BATCH["attention_mask"][..., None]
    output.sin().sum().backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return output.detach(), gradients


# Their configurations name the kinds of their layers, or a window that is not used.
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "SmolLM3", "Olmoe"])
def test_layers_that_all_see_everything_are_packed(kind: str) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2} if kind == "Olmoe" else {}
    model = model_of(kind, **options)
    exact, gradients = output_and_gradients(model)
    with packed_blocks(model):
        packed, packed_gradients = output_and_gradients(model)
    torch.testing.assert_close(packed, exact, rtol=1e-3, atol=1e-4)
    assert packed_gradients.keys() == gradients.keys()
    for name, one in packed_gradients.items():
        torch.testing.assert_close(one, gradients[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("Gemma2", {"head_dim": 16}),
        ("ModernBert", {}),
    ],
)
def test_a_window_that_is_used_is_refused(kind: str, options: Any) -> None:
    with (
        pytest.raises(MisconfigurationException, match="a window of others only"),
        packed_blocks(model_of(kind, **options)),
    ):
        pass


def test_a_mask_that_the_model_computes_itself_is_refused_not_ignored() -> None:
    model = model_of("Doge")
    said = r"DogeModel: DogeAttention calls attention with a mask of its own, of shape .*batching='length'"
    with packed_blocks(model), pytest.raises(MisconfigurationException, match=said):
        model(**BATCH)


def test_blocks_in_two_lists_are_refused_before_training() -> None:
    model = model_of("HrmText")
    with pytest.raises(MisconfigurationException, match="its blocks are in more than one list"), packed_blocks(model):
        pass


def test_attention_outside_the_blocks_is_refused_by_name() -> None:
    model = model_of("Llama")
    other = model_of("Llama")
    with packed_blocks(model):
        # As of a model that was built with the configuration of the packed one.
        other.config._attn_implementation = model.config._attn_implementation
        with pytest.raises(MisconfigurationException, match="LlamaAttention attends outside the blocks"):
            other(**BATCH)
        with pytest.raises(MisconfigurationException, match=r"LlamaModel: LlamaAttention.*without the model around"):
            model.layers[0].self_attn(torch.zeros(1, 3, 32), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16)), None)


@pytest.mark.parametrize("place", ["configuration", "call"])
def test_what_routers_say_is_refused_by_name(place: str) -> None:
    options: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    if place == "configuration":
        options["output_router_logits"] = True
    model = model_of("Mixtral", "ForCausalLM", **options)
    asked = {"output_router_logits": True} if place == "call" else {}

    def train() -> None:
        with packed_blocks(model):
            model(**BATCH, labels=BATCH["input_ids"], **asked)

    with pytest.raises(MisconfigurationException, match="output_router_logits"):
        train()


def test_first_tokens_of_a_model_that_repeats_one_block_are_refused_before_training() -> None:
    model = model_of("Albert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    exact, _ = output_and_gradients(model)
    with packed_blocks(model):
        torch.testing.assert_close(output_and_gradients(model)[0], exact, rtol=1e-4, atol=1e-5)
    with (
        pytest.raises(MisconfigurationException, match="same blocks several times"),
        packed_blocks(model, first_token=True),
    ):
        pass
