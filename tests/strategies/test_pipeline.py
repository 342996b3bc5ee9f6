"""MeshStrategy(pipeline=N): stages in several processes train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Manual, quiet
from tests.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from hasten.strategies import MeshStrategy
from hasten.strategies.mesh.stages import Stages

WORDS, WIDTH = 11, 6
# A part of the words in each process: of the embedding, which is the output layer, too.
PLAN = {"words": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}


class SaveAt(L.Callback):
    """Saves a checkpoint after a number of batches of a fit."""

    def __init__(self, batches: int, path: Path) -> None:
        self.left, self.path = batches, path

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)


class Block(nn.Module):
    """A block of a decoder, which takes a mask and returns a tuple, as some of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        return hidden + self.down(torch.tanh(self.up(hidden))) * mask, None


class Decoder(L.LightningModule):
    """A small language model whose output layer is its embedding; keeps losses and norms."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, mask = self.words(tokens) + self.place, (tokens != 0)[..., None]
        for block in self.blocks:
            hidden = block(hidden, mask)[0]
        return self.head(self.norm(hidden))

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self(batch[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx="max", sync_dist=True)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (*batch[0].shape, WORDS)
        self.losses.append(float(self.trainer.strategy.all_reduce(outputs["loss"], reduce_op="mean")))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.runtime.engine.clip_norm(self.parameters(), 1e9)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0], sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        # Few operations: torch searches long how each computes with what is divided twice.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def data(batch_size: int, samples: int = 42) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (samples, 5), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size)


def fitted(strategy: Any, devices: int, batch_size: int = 16, **options: Any) -> tuple[Decoder, L.Trainer]:
    module = Decoder().double()
    arguments = {key: options.pop(key) for key in ("ckpt_path",) if key in options}
    defaults: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    trainer = quiet(devices=devices, strategy=strategy, **{**defaults, **options})
    trainer.fit(module, data(batch_size), data(batch_size, 32), **arguments)
    return module, trainer


def whole(trainer: L.Trainer, folder: Path, name: str) -> dict[str, Any]:
    """Return the checkpoint of a trainer, the same on all processes."""
    trainer.save_checkpoint(folder / name)
    trainer.strategy.barrier()
    checkpoint: dict[str, Any] = torch.load(folder / name, weights_only=False)
    return checkpoint


def assert_alike(found: Any, expected: Any, folder: Path, name: str) -> None:
    (module, trainer), (alone, its_trainer) = found, expected
    torch.testing.assert_close(module.losses, alone.losses, atol=1e-12, rtol=1e-12, msg=name)
    torch.testing.assert_close(module.norms, alone.norms, atol=1e-12, rtol=1e-12, msg=name)
    for key in ("train_loss_epoch", "largest", "val_loss"):
        value, other = trainer.callback_metrics[key], its_trainer.callback_metrics[key]
        torch.testing.assert_close(value, other, atol=1e-9, rtol=1e-9, msg=f"{name} {key}", check_dtype=False)
    checkpoint = whole(trainer, folder, f"{name}.ckpt")
    weights = alone.state_dict()
    assert list(checkpoint["state_dict"]) == list(weights)
    for key, value in checkpoint["state_dict"].items():
        torch.testing.assert_close(value, weights[key], atol=1e-12, rtol=0, msg=f"{name} {key}")
    state = its_trainer.optimizers[0].state_dict()["state"]
    for key, entry in checkpoint["optimizer_states"][0]["state"].items():
        torch.testing.assert_close(entry["momentum_buffer"], state[key]["momentum_buffer"], atol=1e-12, rtol=0)
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(state)


@pytest.mark.world_size(4)
def test_stages_train_as_one_process_and_their_checkpoints_go_on_elsewhere(tmp_path: Path) -> None:
    alone = fitted("auto", 1, callbacks=[SaveAt(1, tmp_path / "alone.ckpt")])
    for sizes, options in (
        # Uneven stages.
        ((1, 1, 1, 1, 4), {"split": ["blocks.1", "blocks.4", "blocks.7"]}),
        ((1, 2, 1, 1, 2), {"micro_batches": 4, "schedule": "Interleaved1F1B"}),
        ((1, 1, 1, 1, 4), {"micro_batches": 4, "schedule": "zbvzerobubble"}),
        ((1, 1, 2, 1, 2), {"plan": PLAN}),
    ):
        strategy = MeshStrategy(*sizes, **options)
        found = fitted(strategy, 4, 16 // (sizes[0] * sizes[1]), callbacks=[SaveAt(1, tmp_path / "stages.ckpt")])
        assert_alike(found, alone, tmp_path, f"{options}{sizes}")
    module, trainer = found
    # Of the last 10 samples, there are fewer micro-batches than stages.
    expected = alone[1].validate(alone[0], data(16, 26), verbose=False)
    assert trainer.validate(module, data(16, 26), verbose=False)[0] == pytest.approx(expected[0], rel=1e-12)
    for one, other in zip(trainer.predict(module, data(16, 20)), alone[1].predict(alone[0], data(16, 20)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    for other in ("ddp", "fsdp"):
        with refused(ValueError, "strategy", fix="new module"):
            quiet(devices=4, strategy=other).fit(module, data(4))
    held: Any = module.blocks[0]
    assert held.up.weight.isnan().all() or held.up.weight.to_local().numel() == 4 * WIDTH
    # In the middle of an accumulation: from stages of split layers to one process, and from one process to stages.
    copies = MeshStrategy(2, 1, pipeline=2, schedule="GPipe")
    halves = MeshStrategy(1, 1, 2, pipeline=2, plan=PLAN)
    for path, then, devices in (("stages.ckpt", "auto", 1), ("alone.ckpt", copies, 4), ("alone.ckpt", halves, 4)):
        resumed = fitted(then, devices, 8 if then is copies else 16, ckpt_path=tmp_path / path)
        weights = whole(resumed[1], tmp_path, "resumed.ckpt")["state_dict"]
        for key, value in alone[0].state_dict().items():
            torch.testing.assert_close(weights[key], value, atol=1e-12, rtol=0, msg=f"{path} {devices} {key}")
    averages = [
        fitted(how, devices, callbacks=[EMAWeightAveraging(decay=0.5)])
        for how, devices in (("auto", 1), (MeshStrategy(1, 1, 2, pipeline=2, plan=PLAN), 4))
    ]
    assert_alike(averages[1], averages[0], tmp_path, "average")
    with refused(ValueError, fix="EMAWeightAveraging", says="pipeline"):
        fitted(MeshStrategy(1, 1, pipeline=4), 4, callbacks=[StochasticWeightAveraging(0.1)], max_epochs=3)


def one_stage(module: nn.Module, stage: int, split: list[str] | None = None) -> Stages:
    stages = Stages(module, 2, split, [stage], "MeshStrategy")
    stages.leave_out(module, torch.device("cpu"))
    stages.divide_forward()
    return stages


def test_what_a_step_may_not_do_is_refused_by_name() -> None:
    tokens = torch.ones(2, 4, dtype=torch.int64)
    hidden = torch.zeros(2, 4, WIDTH, requires_grad=True)

    class HeadFirst(Decoder):
        def __init__(self) -> None:
            super().__init__(2)
            blocks = self.blocks
            del self.blocks
            self.blocks = blocks

    module = HeadFirst()
    stages = one_stage(module, 1)
    stages.run(1, hidden, module, [tokens]).sum().backward()
    with refused(ValueError, "pipeline", fix="assign it after 'blocks'", says="which is in stage 0"):
        stages.check_gradients()

    class Skips(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[0](self.words(tokens), tokens[..., None])[0]

    class Jumps(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[3](self.words(tokens), tokens[..., None])[0]

    class Second(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            words = self.words(tokens)
            for block in self.blocks:
                words = block(words, words.mean(-1, keepdim=True))[0]
            return words

    class Nothing(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[0](None, tokens)

    for kind, stage, says in (
        (Skips, 0, "ended before it called 'blocks.2'"),
        (Jumps, 0, "stage 0 called 'blocks.3'"),
        (Second, 1, "'blocks.2' takes a second tensor"),
        (Nothing, 1, "the first argument of 'blocks.0' is a NoneType"),
    ):
        module = kind(4)
        with refused(ValueError, "pipeline", says=says):
            one_stage(module, stage).run(stage, hidden if stage else None, module, [tokens])
    module = Decoder(4)
    one_stage(module, 1)
    with refused(RuntimeError, fix="training_step", says="'blocks.0' is in another process"):
        module(tokens)
    for split, says in ((["blocks.9"], "'blocks.9'"), (["head"], "one list"), (["blocks.0"], "'blocks.0'")):
        with refused(ValueError, "split", says=says):
            one_stage(Decoder(2), 0, split)
    with refused(ValueError, "pipeline", fix="Put its blocks into one", says="at least 2"):
        one_stage(nn.Linear(2, 2), 0)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    for arguments, argument, says in (
        ({"schedule": "2F2B"}, "schedule", "'2F2B'"),
        ({"split": ["a", "b"]}, "split", "split makes 3"),
        ({"split": "a"}, "split", "'a'"),
        ({"schedule": "ZBVZeroBubble", "split": ["a"]}, "split", "its number of stages is 4"),
        ({"schedule": "Interleaved1F1B", "micro_batches": 5}, "micro_batches", "rounds of at least 2"),
        ({"state_dict_type": "sharded"}, "state_dict_type", "files"),
        ({"pipeline": 1, "split": ["a"]}, "split", "for a pipeline"),
    ):
        with refused((ValueError, TypeError), argument, says=says):
            MeshStrategy(**{"pipeline": 2, **arguments})
    for strategy, devices, argument, says in (
        (MeshStrategy(pipeline=2, cpu_offload=True), 2, "cpu_offload", "nothing is sharded"),
        (MeshStrategy(pipeline=2, schedule="ZBVZeroBubble"), 4, "schedule", "fully_shard"),
        (MeshStrategy(1, 1, context=2, pipeline=2, schedule="ZBVZeroBubble"), 4, "schedule", "fully_shard"),
        (MeshStrategy(1, 1, 2, pipeline=2), 4, "plan", "which layers a stage has"),
        (MeshStrategy(pipeline=3), 4, "replicate", "pipeline=3"),
    ):
        with refused(ValueError, argument, says=says):
            quiet(devices=devices, strategy=strategy)
    with refused(ValueError, "precision", says="bf16-true"):
        quiet(devices=2, strategy=MeshStrategy(pipeline=2), precision="bf16-true")
    with refused(ValueError, "compile", fix="block.compile()"):
        MeshStrategy(pipeline=2).engine.check_compile("Trainer", trains=True)
    for module, says in ((Manual(), "optimizes manually"), (nn.Linear(2, 2), "no training_step")):
        with refused(ValueError, says=says):
            MeshStrategy(pipeline=2).shard(module)
