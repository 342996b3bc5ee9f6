"""Tensor-parallel plans: what they name, and what cannot be split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from hasten.demos.transformer import LightningTransformer
from hasten.strategies.experts import SplitExperts, WholeExperts
from hasten.strategies.plans import resolve

transformers = pytest.importorskip("transformers")


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, **{**sizes, "num_key_value_heads": 2, **changes})
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def encoder() -> nn.Module:
    with torch.device("meta"):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def styles(model: nn.Module, plan: Any, size: int = 2, **options: Any) -> dict[str, Any]:
    return {part.name: part.style for part in resolve(model, plan, size, **options)}


def refusal(model: nn.Module, plan: Any, size: int = 2, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        resolve(model, plan, size, **options)
    text = str(caught.value)
    assert text.startswith("plan=")
    assert text.count("\n") <= 1
    return text


def test_patterns_name_modules_and_styles_may_be_torchs_or_their_names() -> None:
    own = RowwiseParallel()
    found = styles(llama(), {"model.layers.*.mlp.up_proj": "colwise", "model.layers.1.mlp.down_proj": own})
    assert list(found) == [
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    assert isinstance(found["model.layers.0.mlp.up_proj"], ColwiseParallel)
    assert found["model.layers.1.mlp.down_proj"] is own
    assert styles(mlp(), {"0": "replicate", "2": "rowwise_rep"})["2"].input_layouts == (Replicate(),)


def test_a_plan_that_does_not_fit_is_refused_by_name() -> None:
    assert "Did you mean 'model.layers.*.mlp.up_proj'?" in refusal(llama(), {"model.layers.*.mlp.upproj": "colwise"})
    assert "'0', '1', '2'" in refusal(mlp(), {"body": "colwise"})
    assert "'columnwise' of '0' has no counterpart" in refusal(mlp(), {"0": "columnwise"})
    assert "Write ColwiseParallel()." in refusal(mlp(), {"0": ColwiseParallel})
    assert "is not a torch ParallelStyle" in refusal(mlp(), {"0": 3})
    assert "'0' and '[02]' both name '0'" in refusal(mlp(), {"0": "colwise", "[02]": "rowwise"})
    assert "'1' is a ReLU" in refusal(mlp(), {"1": "colwise"})
    assert "'1' is a ReLU, and 'split_dropout'" in refusal(mlp(), {"1": "split_dropout"})
    assert "out_features=8, which 3 processes" in refusal(mlp(), {"0": "colwise"}, 3)
    assert "in_features=8, which 3 processes" in refusal(mlp(), {"2": "rowwise"}, 3)
    # Whole at both ends, a layer may be split into unequal parts.
    assert styles(nn.Sequential(nn.Embedding(7, 4)), {"0": "embedding_rowwise"}, 4)
    assert styles(mlp(), {"0": "colwise_gather_output", "2": "rowwise_split_input"}, 3)
    for name in ("layers.*.self_attn", "layers.*.self_attn.out_proj"):
        assert "nn.MultiheadAttention" in refusal(encoder(), {name: "colwise"})


def test_heads_that_cannot_be_shared_are_refused_by_name() -> None:
    assert "'model.layers.0.self_attn.k_proj' has num_key_value_heads=2, which 4" in refusal(llama(), "auto", 4)
    few = llama(num_key_value_heads=4, num_attention_heads=12, hidden_size=96)
    assert "'model.layers.0.self_attn.q_proj' has num_attention_heads=12, which 8" in refusal(few, "auto", 8)
    # Gathered, the heads are whole again.
    assert styles(llama(), {"model.layers.*.self_attn.k_proj": "colwise_gather_output"}, 4)


def test_models_of_hugging_face_bring_their_plans() -> None:
    found = styles(llama(), "auto")
    layer = "model.layers.1"
    assert isinstance(found[f"{layer}.self_attn.o_proj"], RowwiseParallel)
    assert isinstance(found[f"{layer}.mlp.gate_proj"], ColwiseParallel)
    assert found["lm_head"].output_layouts == (Replicate(),)
    assert found["model.embed_tokens"].output_layouts == (Replicate(),)
    # Within a module of the user's.
    assert set(styles(nn.ModuleDict({"net": llama()}), "auto")) == {f"net.{name}" for name in found}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        qwen = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=8, **sizes)
        )

        bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **sizes))
        distilbert = transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=48, n_layers=1, n_heads=4)
        )
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        neo = transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=1, attention_types=[[["global"], 1]])
        )
    assert isinstance(styles(qwen, "auto")["model.layers.0.self_attn.q_norm"], SequenceParallel)

    assert isinstance(styles(bert, "auto")["bert.encoder.layer.0.attention.output.dense"], RowwiseParallel)
    assert "has 4 heads" in refusal(bert, "auto", 8).replace("num_attention_heads=4", "4 heads")
    assert len(styles(distilbert, "auto")) == 6
    assert "GPTNeoForCausalLM has no plan" in refusal(neo, "auto")
    assert "'transformer.h.0.mlp.c_fc' has out_features=128, which 3" in refusal(gpt2, "auto", 3)
    assert styles(gpt2, "auto", loss_parallel=True)["lm_head"].output_layouts == (Shard(-1),)


def mixtral(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 4, "num_local_experts": 4}
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(vocab_size=64, **{**sizes, **experts, **changes})
        )


def test_experts_are_split_or_divided_and_routers_stay_whole() -> None:
    split, divided = styles(mixtral(), "auto"), styles(mixtral(), "auto", expert_parallel=True)
    experts = "model.layers.1.mlp.experts"
    assert isinstance(split[experts], SplitExperts)
    assert isinstance(divided[experts], WholeExperts)
    assert set(split) == set(divided)
    assert not any("gate" in name for name in split)
    named = styles(mixtral(), {"model.layers.*.mlp.experts": "expert"})
    assert set(named) == {"model.layers.0.mlp.experts", experts}
    assert isinstance(named[experts], WholeExperts)
    assert set(styles(nn.ModuleDict({"net": mixtral()}), "auto")) == {f"net.{name}" for name in split}


def test_experts_that_cannot_be_shared_are_refused_by_name() -> None:
    few = mixtral(num_local_experts=3)
    assert "experts' has num_experts=3, which 2" in refusal(few, "auto", expert_parallel=True)
    assert "'gate_up_proj' with 49 hidden features, which 2" in refusal(mixtral(intermediate_size=49), "auto")
    assert "no plan in LlamaForCausalLM names experts" in refusal(llama(), "auto", expert_parallel=True)
    assert "the style 'expert'" in refusal(llama(), {"lm_head": "colwise_rep"}, expert_parallel=True)
    assert "'0' is a Linear, and experts are divided" in refusal(mlp(), {"0": "expert"})
    assert "has experts, whose router" in refusal(mixtral(), "auto", sequence_parallel=True)
    model = mixtral()
    model.model.layers[0].mlp.experts.bias = nn.Parameter(torch.zeros(32, device="meta"))
    assert "the parameter 'bias', which SplitExperts" in refusal(model, "auto")
    assert "the parameter 'bias', which WholeExperts" in refusal(model, "auto", expert_parallel=True)
    model = mixtral()
    model.model.layers[0].mlp.experts.is_transposed = True
    assert "matrices that are transposed" in refusal(model, "auto")
    assert styles(model, "auto", expert_parallel=True)
    model = mixtral()
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.gate.weight": "colwise"}
    assert "the parameter 'model.layers.0.mlp.gate.weight' the style 'colwise'" in refusal(model, "auto")


def test_layers_of_torch_and_the_demo_have_ready_plans() -> None:
    assert set(styles(encoder(), "auto")) == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("linear1", "dropout", "linear2")
    }
    with torch.device("meta"):
        demo = LightningTransformer(vocab_size=50)
    found = styles(demo, "auto", loss_parallel=True)
    assert "model.transformer.decoder.layers.1.linear2" in found
    assert "model.embedding" in found
    assert found["model.decoder"].output_layouts == (Shard(-1),)
    assert "Sequential has no plan" in refusal(mlp(), "auto")


def test_sequence_and_loss_parallel_complete_an_automatic_plan() -> None:
    found = styles(llama(), "auto", sequence_parallel=True, loss_parallel=True)
    assert isinstance(found["model.norm"], SequenceParallel)
    assert isinstance(found["model.layers.0.input_layernorm"], SequenceParallel)
    assert found["model.layers.0.mlp.down_proj"].output_layouts == (Shard(1),)
    assert found["lm_head"].input_layouts == (Shard(1),)
    assert found["lm_head"].output_layouts == (Shard(-1),)
    for refused in (
        refusal(encoder(), "auto", sequence_parallel=True),
        refusal(encoder(), "auto", loss_parallel=True),
        refusal(mlp(), {"0": "colwise"}, sequence_parallel=True),
        refusal(mlp(), {"0": "colwise"}, loss_parallel=True),
    ):
        assert "_parallel=True" in refused
    own = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    assert styles(mlp(), {"2": own}, loss_parallel=True) == {"2": own}
