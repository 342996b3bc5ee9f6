"""Muon for hidden matrices and AdamW for the rest are one optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.optim import muon
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


class Deep(Classifier):
    def __init__(self, fused: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 2))
        self.fused = fused

    def configure_optimizers(self) -> Any:
        optimizer = muon(self, lr=0.02, adamw_lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def made(seed: int = 0) -> Deep:
    torch.manual_seed(seed)
    return Deep()


def names(optimizer: Any, algorithm: str) -> set[str]:
    groups = [group for group in optimizer.param_groups if group["algorithm"] == algorithm]
    return {name for group in groups for name in group["param_names"]}


def test_the_split_of_a_transformer() -> None:
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(10, 8),
            "patches": nn.Conv2d(3, 8, 2),
            "block": nn.TransformerEncoderLayer(8, 2, 16),
            "head": nn.Linear(8, 10, bias=False),
        }
    )
    optimizer = muon(model)
    assert names(optimizer, "muon") == {
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
    }
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays["tokens.weight"] == decays["head.weight"] == decays["patches.weight"] == 0.1
    assert decays["head.weight"] != decays["block.norm1.weight"] == decays["block.linear1.bias"] == 0.0
    assert len(decays) == len(list(model.parameters()))


def test_a_tied_head_is_an_embedding_and_names_can_be_given() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False))
    model[3].weight = model[0].weight
    assert names(muon(model), "muon") == {"1.weight", "2.weight"}
    assert names(muon(model, adamw=["1."]), "muon") == {"2.weight"}


def test_heads_and_embeddings_are_known_by_their_names_too() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Before the body, as in many programs.
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            self.pos_embed = nn.Parameter(torch.zeros(10, 8))
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.mix = nn.Parameter(torch.zeros(8, 8))

    assert names(muon(Vision()), "muon") == {"head.0.weight", "body.0.weight", "body.1.weight", "mix"}


def test_steps_are_those_of_the_two_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    mine, other = made(), made()
    optimizer = muon(mine, lr=0.02, adamw_lr=0.01)
    hidden = [other.layers[0].weight, other.layers[2].weight]
    vectors = [p for p in other.parameters() if p.ndim == 1]
    two = (
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [other.layers[3].weight], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.01,
            betas=(0.9, 0.95),
            fused=True,
        ),
    )
    for batch in loader():
        mine.loss(batch).backward()
        other.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in two:
            each.step()
            each.zero_grad()
    assert same_weights(mine, other)


def test_a_cpu_without_bfloat16_computes_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 2, bias=False))
    before, gradient = model[0].weight.detach().clone(), torch.randn(16, 8)
    optimizer = muon(model, lr=1.0, weight_decay=0.0, adjust_lr_fn="original")
    model[0].weight.grad = gradient.clone()
    optimizer.step()

    # Nesterov's momentum changes the length of the first gradient alone.
    x = gradient.T / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    torch.testing.assert_close(before - model[0].weight, 2**0.5 * x.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[0].weight.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_training_and_resume(precision: Any, tmp_path: Path) -> None:
    whole = made()
    trainer = quiet(max_epochs=2, precision=precision, gradient_clip_val=1.0)
    trainer.fit(whole, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.002)
    begun = quiet(max_steps=13, precision=precision, gradient_clip_val=1.0)
    begun.fit(made(), loader())
    begun.save_checkpoint(tmp_path / "a.ckpt")
    resumed = made(seed=1)
    quiet(max_epochs=2, precision=precision, gradient_clip_val=1.0).fit(
        resumed, loader(), ckpt_path=tmp_path / "a.ckpt"
    )
    assert same_weights(whole, resumed)


def test_fused_is_a_matter_of_adamw() -> None:
    for fused in (True, False):
        trainer = quiet(fused_optimizer=fused)
        trainer.fit(made(), loader())
        flags = {group["algorithm"]: group.get("fused") for group in trainer.optimizers[0].param_groups}
        assert flags == {"muon": None, "adamw": fused}


def test_a_copy_steps_by_itself() -> None:
    module = made()
    optimizer = muon(module)
    module.loss(next(iter(loader()))).backward()
    optimizer.step()
    twin, twin_optimizer = copy.deepcopy((module, optimizer))
    before = [p.detach().clone() for p in module.parameters()]
    twin.loss(next(iter(loader()))).backward()
    twin_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not same_weights(module, twin)


def test_groups_can_be_added() -> None:
    module = made()
    optimizer = muon(module)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(3)
    optimizer.step()
    assert extra.max() < 0.6
    with refused(ValueError, says="'muon'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "algorithm": "muon"})
    with refused(ValueError, fix="'muon'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "algorithm": "adam"})
    # Groups need no names.
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    by_hand = type(optimizer)([{"params": [matrix], "algorithm": "muon"}, {"params": [vector], "algorithm": "adamw"}])
    vector.grad = torch.ones(3)
    by_hand.step()
    assert vector.max() < 1
