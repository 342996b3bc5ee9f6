"""Mixtures of experts on two and four processes, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.strategies import MeshStrategy, ModelParallelStrategy

transformers = pytest.importorskip("transformers")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROUTED = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True}


def language_model(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**_SIZES, **_ROUTED, "intermediate_size": 48, "router_aux_loss_coef": 0.1, **changes}
    if kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **sizes))
    else:
        config = getattr(transformers, f"{kind}Config")
        experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**sizes, **experts, mlp_only_layers=[0]))
    return model.train()


class Routed(L.LightningModule):
    """A small mixture of experts of Hugging Face, which logs its balance loss."""

    def __init__(self, kind: str = "mixtral", **changes: Any) -> None:
        super().__init__()
        self.model = language_model(kind, **changes)
        self.seen: list[float] = []
        self.aux_loss = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        output = self.model(input_ids=tokens, labels=tokens)
        self.log("aux_loss", output.aux_loss, on_epoch=True, sync_dist=True)
        self.seen += [float(output.loss.detach()), float(output.aux_loss.detach())]
        return output.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.trainer.runtime.engine.clip_norm(self.parameters(), 1e9)))

    def configure_optimizers(self) -> Any:
        # Where a gradient is nearly zero, Adam would magnify how it is rounded.
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


def tokens(batch_size: int = 2, readers: int = 1) -> DataLoader[Any]:
    """Return batches; for one process, those of several readers, one after the other."""
    ids = torch.randint(0, 64, (8, 5), generator=torch.Generator().manual_seed(3))
    order = torch.arange(8).view(-1, batch_size, readers).transpose(1, 2).flatten()
    return DataLoader(TensorDataset(ids[order]), batch_size)


def divided(data: Any = "auto", tensor: Any = "auto", **options: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        **{"plan": "auto", "save_distributed_checkpoint": False, **options},
    )


def trained(module: Routed, strategy: Any = "auto", devices: int = 1, readers: int = 1, **options: Any) -> Routed:
    torch.manual_seed(5)
    run = {"accumulate_grad_batches": 2 * readers, "gradient_clip_val": 0.1, **options}
    trainer = quiet(devices=devices, strategy=strategy, **run)
    trainer.fit(module, tokens(readers=readers))
    module.aux_loss = float(trainer.callback_metrics["aux_loss_epoch"])
    return module


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    others = dict(other.named_parameters())
    for name, value in one.named_parameters():
        torch.testing.assert_close(
            whole(others[name]),
            whole(value),
            **(tolerance or CLOSE),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.world_size(2)
def test_experts_over_two_processes_train_and_resume_as_on_one(tmp_path: Path) -> None:
    # One test, because most of its time is the start of two processes. Qwen2-MoE has shared experts, Qwen3-MoE norms of
    # heads, and both here a layer without experts.
    trains_as_on_one("mixtral", False, True)
    trains_as_on_one("Qwen2Moe", False)
    trains_as_on_one("Qwen3Moe", True)
    tokens_travel_to_the_experts_that_they_chose()
    a_process_whose_experts_no_token_chose_waits_for_nobody()
    checkpoints_go_on_in_one_process(tmp_path)


def trains_as_on_one(kind: str, *ways: bool) -> None:
    alone = trained(Routed(kind))
    for whole_experts in ways:
        two = trained(Routed(kind), divided(expert_parallel=whole_experts), 2)
        same(alone, two)
        assert two.seen == pytest.approx(alone.seen, abs=1e-5, rel=1e-5)
        assert two.aux_loss == pytest.approx(alone.aux_loss, abs=1e-5)
        experts: Any = two.model.get_submodule("model.layers.1.mlp.experts")
        parts = [parameter.to_local() for parameter in experts.parameters()]
        assert sum(part.numel() for part in parts) * 2 == sum(each.numel() for each in experts.parameters())
        assert (parts[0].shape[0] == 2) is whole_experts
        router: Any = two.model.get_submodule("model.layers.1.mlp.gate")
        assert not hasattr(router.weight, "to_local")


def tokens_travel_to_the_experts_that_they_chose() -> None:
    for kind, how in (("mixtral", "grouped_mm"), ("Qwen2Moe", "eager")):
        alone = trained(Routed(kind, experts_implementation=how), readers=2)
        two = trained(Routed(kind, experts_implementation=how), MeshStrategy(expert=2), 2)
        same(alone, two)
        # The last is the norm of the gradients of the only step.
        assert two.seen[-1] == pytest.approx(alone.seen[-1], abs=1e-5)
        assert two.aux_loss == pytest.approx(alone.aux_loss, abs=1e-5)
        experts: Any = two.model.get_submodule("model.layers.1.mlp.experts")
        assert [part.to_local().shape[0] for part in experts.parameters()] == [2, 2]


def a_process_whose_experts_no_token_chose_waits_for_nobody() -> None:
    def favoured(how: str) -> Routed:
        module = Routed(experts_implementation=how)
        for layer in range(2):
            router: Any = module.model.get_submodule(f"model.layers.{layer}.mlp.gate")
            # All tokens choose the first two experts, which are on the first process.
            with torch.no_grad():
                router.weight.zero_()
            router.register_forward_hook(_first_two)
        return module

    for how in ("eager", "grouped_mm"):
        # Whichever the loop over experts or the products of all of them is, each process has a backward.
        two = trained(favoured(how), divided(expert_parallel=True), 2)
        alone = trained(favoured(how))
        same(alone, two)


def _first_two(router: nn.Module, _: Any, output: Any) -> Any:
    logits, scores, chosen = output
    return logits, scores, torch.arange(2).expand_as(chosen)


def checkpoints_go_on_in_one_process(tmp_path: Path) -> None:
    def fit(strategy: Any, devices: int, epochs: int, resumed: Path | None = None, saved: Path | None = None) -> Routed:
        module = Routed()
        trainer = quiet(devices=devices, strategy=strategy, max_epochs=epochs)
        trainer.fit(module, tokens(), ckpt_path=resumed)
        if saved is not None:
            trainer.save_checkpoint(saved)
        return module

    alone = fit("auto", 1, 2)
    for whole_experts, folder in ((False, True), (True, False)):
        path = tmp_path / f"{whole_experts} {folder}"
        fit(divided(expert_parallel=whole_experts, save_distributed_checkpoint=folder), 2, 1, saved=path)
        assert path.is_dir() is folder
        same(alone, fit("auto", 1, 2, resumed=path))
        same(alone, fit(divided(expert_parallel=not whole_experts, save_distributed_checkpoint=True), 2, 2, path))


class Unbalanced(Routed):
    """Without the balance loss, which is one of a batch: that of two halves is not the mean of theirs."""

    def __init__(self) -> None:
        super().__init__(output_router_logits=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss


@pytest.mark.world_size(4)
def test_two_groups_with_experts_train_as_one_process(tmp_path: Path) -> None:
    alone = Unbalanced()
    quiet().fit(alone, tokens(4))
    for whole_experts in (False, True):
        path, four = tmp_path / f"{whole_experts}", Unbalanced()
        strategy = divided(2, 2, expert_parallel=whole_experts, save_distributed_checkpoint=True)
        trainer = quiet(devices=4, strategy=strategy)
        trainer.fit(four, tokens(2))
        same(alone, four)
        trainer.save_checkpoint(path)
        read = Unbalanced()
        quiet().fit(read, tokens(4), ckpt_path=path)
        same(four, read, atol=0, rtol=0)
