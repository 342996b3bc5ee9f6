"""Which models of transformers are packed, and which are refused, by what they really do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException
from hasten.packed.blocks import packed_blocks
from tests.packed.test_blocks import WIDTH, WORDS, batch_of
from tests.refusals import refused

BATCH = batch_of([7, 3, WIDTH, 1])


def model_of(kind: str, head: str = "Model", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this version of transformers has no {kind}")
    small = {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
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


WINDOW = "its tokens attend to a window of others only"


@pytest.mark.parametrize(
    ("kind", "options", "first_token", "said"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, False, WINDOW),
        ("Mistral", {"sliding_window": 4}, False, WINDOW),
        ("ModernBert", {}, False, WINDOW),
        ("T5", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, False, "T5"),
        ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 32, "layerdrop": 0.3}, False, "layerdrop=0.3 skips whole"),
        ("HrmText", {}, False, "its blocks are in more than one list"),
        ("Mixtral", {"output_router_logits": True, "sliding_window": None}, False, "output_router_logits"),
        ("Llama", {}, True, "the first token depends on no other token"),
        ("Albert", {}, True, "same blocks several times"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_before_training(
    kind: str, options: Any, first_token: bool, said: str
) -> None:
    model = model_of(kind, **options)
    with pytest.raises(MisconfigurationException, match=said), packed_blocks(model, first_token=first_token):
        pass


def test_a_mask_that_the_model_computes_itself_is_refused_not_ignored() -> None:
    model = model_of("Doge")
    said = r"DogeModel: DogeAttention calls attention with its own mask, of shape .*batching='length'"
    with packed_blocks(model), pytest.raises(MisconfigurationException, match=said):
        model(**BATCH)


def test_attention_outside_the_blocks_is_refused_by_name() -> None:
    model = model_of("Llama")
    other = model_of("Llama")
    with packed_blocks(model):
        # As of a model that was built with the configuration of the packed one.
        other.config._attn_implementation = model.config._attn_implementation
        with refused(MisconfigurationException, "packed", says="LlamaAttention"):
            other(**BATCH)
        with refused(MisconfigurationException, "packed", says="LlamaModel"):
            model.layers[0].self_attn(torch.zeros(1, 3, 32), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16)), None)


def test_outputs_of_routers_are_refused_in_a_call() -> None:
    model = model_of("Mixtral", "ForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    with packed_blocks(model), refused(MisconfigurationException, "packed", says="output_router_logits"):
        model(**BATCH, labels=BATCH["input_ids"], output_router_logits=True)


def test_a_model_that_repeats_one_block_is_packed() -> None:
    model = model_of("Albert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    exact, _ = output_and_gradients(model)
    with packed_blocks(model):
        torch.testing.assert_close(output_and_gradients(model)[0], exact, rtol=1e-4, atol=1e-5)
