"""A small language model with experts, and what it does under MeshStrategy(expert=N), compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Classifier, loader, quiet
from tests.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.strategies import MeshStrategy
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
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
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

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Where to save after the first epoch.
        self.path = path
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norms: list[float] = []
        self.logged: dict[str, Tensor] = {}
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
        return loss + 0.1 * balance

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch)[0], sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.runtime.engine.clip_norm(self.parameters(), 0.5)))

    def on_train_epoch_end(self) -> None:
        if self.path is not None and self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        # Few operations in a step: for each, torch searches long how tensors that are divided twice are computed.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(samples: int = 8) -> DataLoader[Any]:
    """Return batches of one sample each, so that one process reads those of several, one after the other."""
    tokens = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 1)


def trained(module: Mixture, strategy: Any = "auto", devices: int = 1, readers: int = 1, **options: Any) -> L.Trainer:
    """Train for two epochs, each of one or two steps with two batches in each process."""
    trainer = quiet(devices=devices, strategy=strategy, accumulate_grad_batches=2 * readers, max_epochs=2)
    trainer.fit(module, data(), **options)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()  # type: ignore[operator]
        for name, value in module.named_parameters()
    }


def same(one: nn.Module, other: nn.Module, where: object) -> None:
    others = weights(other)
    for name, value in weights(one).items():
        torch.testing.assert_close(others[name], value, **EXACT, msg=lambda text, name=name: f"{where} {name}: {text}")


def train_and_resume_as_in_one_process(folder: Path) -> None:
    """Compare four processes with one: experts in shards and copies, a file and a folder, a process without samples."""
    alone = {}
    for readers in (4, 2):
        alone[readers] = Mixture()
        logged = trained(alone[readers], readers=readers).callback_metrics
        alone[readers].logged = {name: logged[name] for name in ("loss_epoch", "balance_epoch")}
    for name, sizes in (
        ("folder", {"shard": 4, "expert": 2, "state_dict_type": "sharded"}),
        ("file", {"replicate": 2, "shard": 1, "tensor": 2, "expert": 2, "plan": PLAN}),
    ):
        strategy = MeshStrategy(**sizes)  # type: ignore[arg-type]
        many = Mixture(folder / name)
        trainer = trained(many, strategy, 4)
        one = alone[strategy.data_parallel_size]
        same(one, many, sizes)
        assert many.norms == pytest.approx(one.norms, abs=1e-9), sizes
        for key, value in one.logged.items():
            torch.testing.assert_close(trainer.callback_metrics[key], value, **EXACT)
        assert set(strategy.styles) >= {"blocks.0.experts", "blocks.1.experts"}
        for each in many.blocks[0].experts.parameters():  # type: ignore[union-attr]
            # Each copy of an expert is in one process, or in shards.
            assert each.to_local().numel() * 4 // sizes.get("replicate", 1) == each.numel()  # type: ignore[attr-defined, operator]
    resume_on_other_meshes(alone, folder)
    evaluate_all_samples()
    refuse_what_is_divided_otherwise(many)


def resume_on_other_meshes(alone: dict[int, Mixture], folder: Path) -> None:
    assert (folder / "folder").is_dir()
    resumed = Mixture()
    trained(resumed, MeshStrategy(2, 2, expert=4), 4, ckpt_path=folder / "folder")
    same(alone[4], resumed, "folder")
    resumed = Mixture()
    trained(resumed, readers=2, ckpt_path=folder / "file")
    same(alone[2], resumed, "file")
    stored = torch.load(folder / "file", weights_only=False)["state_dict"]
    shapes = {name: value.shape for name, value in resumed.state_dict().items()}
    assert {name: value.shape for name, value in stored.items()} == shapes


def evaluate_all_samples() -> None:
    # One process has no sample, and has seen none before.
    expected = quiet().validate(Mixture(), data(3), verbose=False)
    found = quiet(devices=4, strategy=MeshStrategy(expert=4)).validate(Mixture(), data(3), verbose=False)
    assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-9)


def refuse_what_is_divided_otherwise(divided: Mixture) -> None:
    plan: Any = {"tensor": 2, "plan": {**PLAN, "blocks.*.experts": "expert"}}
    for module, options, argument, says in (
        (divided, {"replicate": 2, "shard": 1, "tensor": 2, "plan": PLAN, "expert": 4}, "", "expert=2"),
        (Classifier(), {"expert": 4}, "expert", "no experts"),
        (Mixture(), {"expert": 4, **plan}, "plan", "names experts"),
    ):
        with refused(ValueError, argument, says=says):
            quiet(devices=4, strategy=MeshStrategy(**options)).fit(module, loader())
