"""MeshStrategy(expert=N): experts in several processes, to which tokens travel, train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader, quiet
from tests.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hasten as L
from hasten.resolve import runtime
from hasten.strategies import FSDPStrategy, MeshStrategy
from hasten.strategies.context import attention

WORDS, WIDTH, EXPERTS, LENGTH = 16, 8, 8, 4
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
EXACT = {"atol": 1e-9, "rtol": 0.0}


class Experts(nn.Module):
    """All experts, in parameters of two and three dimensions; those that no token chose are not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            tokens, place = torch.where(chosen == expert)
            if len(tokens):
                inner = torch.tanh(hidden[tokens] @ self.up[expert].T + self.bias[expert])
                share = weights[tokens, place].unsqueeze(-1)
                result = result.index_add(0, tokens, inner @ self.down[expert].T * share)
        return result


class Block(nn.Module):
    """Attention, a feed-forward part that a plan may split, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        with torch.no_grad():
            # No token chooses the last two, which may be all that a process has.
            self.router.bias[-2:] = -100.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(2)
        x = x + attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.down(torch.tanh(self.up(x)))
        rows = x.flatten(0, 1)
        shares = self.router(rows).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        balance = EXPERTS * (shares.mean(0) * nn.functional.one_hot(chosen, EXPERTS).sum(1).double().mean(0)).sum()
        return x + self.experts(rows, chosen, weights).view(x.shape), balance


class Mixture(L.LightningModule):
    """A small language model with experts, which adds and logs their balance loss."""

    def __init__(self, balance: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.factor = balance
        self.norms: list[float] = []
        self.double()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        x, balance = self.words(tokens), torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), balance

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, balance = self.losses(batch)
        self.log_dict({"loss": loss, "balance": balance}, on_epoch=True, sync_dist=True)
        return loss + self.factor * balance

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch)[0], sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.runtime.engine.clip_norm(self.parameters(), 0.5)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(samples: int = 16, batch_size: int = 1, readers: int = 1) -> DataLoader[Any]:
    """Return batches; for one process, those of several readers, one after the other."""
    tokens = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    order = torch.arange(samples).view(-1, batch_size, readers).transpose(1, 2).flatten().tolist()
    return DataLoader(Subset(TensorDataset(tokens[:, :-1], tokens[:, 1:]), order), batch_size)


def trained(module: Mixture, strategy: Any = "auto", devices: int = 1, **options: Any) -> tuple[Mixture, L.Trainer]:
    readers, path = options.pop("readers", 1), options.pop("ckpt_path", None)
    trainer = quiet(devices=devices, strategy=strategy, accumulate_grad_batches=2 * readers, **options)
    trainer.fit(module, data(readers=readers), ckpt_path=path)
    return module, trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()  # type: ignore[operator]
        for name, value in module.named_parameters()
    }


def same(one: nn.Module, other: nn.Module, where: object = "") -> None:
    others = weights(other)
    for name, value in weights(one).items():
        torch.testing.assert_close(others[name], value, **EXACT, msg=lambda text, name=name: f"{where} {name}: {text}")


@pytest.mark.world_size(4)
def test_experts_over_several_processes_train_and_resume_as_in_one(tmp_path: Path) -> None:
    # One test, because most of its time is the start of four processes.
    alone = {readers: trained(Mixture(), readers=readers) for readers in (4, 2)}
    for sizes in (
        {"shard": 4, "expert": 2},
        {"replicate": 2, "shard": 2, "expert": 4},
        {"replicate": 4, "shard": 1, "expert": 2},
        {"shard": 2, "tensor": 2, "expert": 4, "plan": PLAN},
    ):
        strategy = MeshStrategy(**sizes)  # type: ignore[arg-type]
        many, trainer = trained(Mixture(), strategy, 4)
        one, expected = alone[strategy.data_parallel_size]
        same(one, many, sizes)
        assert many.norms == pytest.approx(one.norms, abs=1e-9), sizes
        for name in ("loss_epoch", "balance_epoch"):
            torch.testing.assert_close(trainer.callback_metrics[name], expected.callback_metrics[name], **EXACT)
        assert set(strategy.styles) >= {"blocks.0.experts", "blocks.1.experts"}
        experts: Any = many.blocks[0].experts
        local = [part.to_local() for part in experts.parameters()]
        # Each expert is in one copy, as evenly as the sizes allow.
        copies = 2 if sizes.get("replicate") == 4 else 1
        assert [part.numel() * 4 // copies for part in local] == [each.numel() for each in experts.parameters()]
    # The balance of a half sequence is another.
    one, _ = trained(Mixture(balance=0.0), readers=2)
    same(one, trained(Mixture(balance=0.0), MeshStrategy(shard=2, context=2, expert=4), 4)[0], "context")
    evaluates_all_samples()
    resumes_on_other_meshes(tmp_path)


def evaluates_all_samples() -> None:
    alone = Mixture()
    for samples in (10, 3):
        # 10 samples, which the processes cannot share equally; of 3, one process has none, and it has seen none before.
        expected = quiet().validate(alone, data(samples), verbose=False)
        found = quiet(devices=4, strategy=MeshStrategy(expert=4)).validate(Mixture(), data(samples), verbose=False)
        assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-9)


def resumes_on_other_meshes(folder: Path) -> None:
    whole, _ = trained(Mixture(), MeshStrategy(expert=4), 4, max_epochs=2)
    alone, _ = trained(Mixture(), readers=4, max_epochs=2)
    same(alone, whole)
    kinds: list[Any] = ["full", "sharded"]
    for kind in kinds:
        path = folder / kind
        _, trainer = trained(Mixture(), MeshStrategy(expert=4, state_dict_type=kind), 4)
        trainer.save_checkpoint(path)
        assert path.is_dir() is (kind == "sharded")
        for strategy in [MeshStrategy(2, 2, expert=2)] if kind == "sharded" else [FSDPStrategy()]:
            resumed, _ = trained(Mixture(), strategy, 4, max_epochs=2, ckpt_path=path)
            same(whole, resumed, kind)
        resumed, _ = trained(Mixture(), readers=4, max_epochs=2, ckpt_path=path)
        same(whole, resumed, kind)
    stored = torch.load(folder / "full", weights_only=False)["state_dict"]
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in Mixture().state_dict().items()
    }
    with refused(ValueError, says="expert=2"):
        quiet(devices=4, strategy=MeshStrategy(expert=2)).validate(whole, data(), verbose=False)
    for module, argument, says in (
        (Classifier(), "expert", "no experts"),
        (Mixture(), "plan", "names experts"),
    ):
        plan = {"plan": {**PLAN, "blocks.*.experts": "expert"}, "tensor": 2} if argument == "plan" else {}
        with refused(ValueError, argument, says=says):
            quiet(devices=4, strategy=MeshStrategy(expert=4, **plan)).fit(module, loader())  # type: ignore[arg-type]


def test_sizes_that_experts_cannot_have_are_refused() -> None:
    for arguments, says in (
        ({"expert": 0}, "expert=0"),
        ({"expert": 2, "pipeline": 2}, "pipeline"),
        ({"expert": 2, "tensor": 2, "plan": "auto", "expert_parallel": True}, "expert_parallel"),
    ):
        with refused(ValueError, "expert", says=says):
            MeshStrategy(**arguments)  # type: ignore[arg-type]
    for sizes in ({"shard": 8, "expert": 3}, {"shard": 8, "expert": 16}, {"replicate": 4, "shard": 2, "expert": 6}):
        with refused(ValueError, "expert", says="8"):
            runtime(accelerator="cpu", devices=8, strategy=MeshStrategy(**sizes))  # type: ignore[arg-type]
    with refused(TypeError, "experts", says="MeshStrategy(expert=N)"):
        MeshStrategy(experts=2)
