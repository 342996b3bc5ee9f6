"""Random combinations of everything a run can be made of, each beside the loop written by hand.

A combination is drawn from a seed. It is trained twice: by the Trainer (or with Fabric) and by ``ByHand``, which knows
nothing of hasten. The weights must be equal, bit for bit where the maths is the same and within the rounding of float64
elsewhere; or the combination is refused before the first training step, with a reason that is expected.

    pytest tests/story/test_random_combinations.py --combinations 1000 -n 2

tries more of them than the tests do.
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import GradientAccumulationScheduler, LambdaCallback
from hasten.optim import in_backward
from tests.models import quiet
from tests.story.by_hand import ByHand, seed_all
from tests.story.combinations import Combination, Model, loader_of, model_of, optimizer_of, validation_of


class Change(L.Callback):
    """Does the change of a combination at its batch."""

    def __init__(self, c: Combination) -> None:
        self.c, self.outputs = c, [] if c.change == "callback" else None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        def skip_epoch(batch: Any, batch_idx: int) -> int | None:
            return -1 if (trainer.current_epoch, batch_idx) == self.c.change_at else None

        if self.c.change == "skip_epoch":
            module.on_train_batch_start = skip_epoch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        c = self.c
        if (trainer.current_epoch, batch_idx) != c.change_at:
            return
        if c.change == "lr":
            trainer.optimizers[0].param_groups[0]["lr"] = 0.03
        elif c.change == "clip":
            trainer.gradient_clip_val = 0.001
        elif c.change == "step":
            step = module.training_step

            def patched(batch: Any, batch_idx: int) -> Any:
                module.factor = 3.0
                return step(batch, batch_idx)

            module.training_step = patched
        elif c.change == "optimizer":
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.02)]
        elif c.change == "eval":
            module.eval_part()
        elif c.change == "zero":
            next(module.parameters()).data.zero_()
        elif c.change == "freeze":
            next(module.parameters()).requires_grad_(False)
        elif c.change == "callback":
            trainer.callbacks.append(LambdaCallback(on_train_batch_end=self.note_outputs))
        elif c.change == "stop":
            trainer.should_stop = True
        elif c.change == "hook":
            previous = module.on_before_optimizer_step

            def doubling(optimizer: Any) -> None:
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)
                previous(optimizer)

            module.on_before_optimizer_step = doubling
        elif c.change == "scheduler_off":
            trainer.lr_scheduler_configs.clear()
        return

    def note_outputs(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((batch_idx, outputs))


def saves(c: Combination, path: Path) -> L.Callback:
    """Return a callback that saves a checkpoint after one batch, or within it."""

    def save_after(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == c.resume_at:
            trainer.save_checkpoint(path)

    def save_within(trainer: Any, module: Any, loss: Any) -> None:
        if (trainer.current_epoch, trainer.progress.batch) == c.resume_at:
            trainer.save_checkpoint(path)

    if c.resume_hook == "on_train_batch_end":
        return LambdaCallback(on_train_batch_end=save_after)
    return LambdaCallback(on_before_backward=save_within)


def saves_often(c: Combination, path: Path) -> L.Callback:
    """Return a callback that saves checkpoints which nobody resumes."""

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.total_batches % c.save_every == 0:
            trainer.save_checkpoint(path)

    return LambdaCallback(on_train_batch_end=save)


def trainer_of(c: Combination, callbacks: list[Any]) -> L.Trainer:
    arguments: dict[str, Any] = {
        "fused": {"fused_optimizer": True},
        "resident": {"resident": True},
        "memory": {"memory": "full"},
        "micro_batch": {"micro_batch": 1},
        "compile": {"compile": {"backend": "aot_eager"}},
        "packed": {"packed": True},
    }.get(c.lever, {})
    if c.clip != "none" and c.loop == "trainer":
        arguments |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": c.clip}
    if c.validation == "every2":
        arguments["val_check_interval"] = 2
    if c.limit is not None:
        arguments["limit_train_batches"] = c.limit
    if c.grows:
        callbacks = [*callbacks, GradientAccumulationScheduler({1: c.accumulate})]
    elif c.loop == "trainer":
        arguments["accumulate_grad_batches"] = c.accumulate
    return quiet(
        num_sanity_val_steps=0,
        max_epochs=c.epochs,
        max_steps=c.max_steps,
        log_every_n_steps=c.log_every,
        precision=c.precision,
        callbacks=callbacks,
        **arguments,
    )


class Refused(Exception):
    """hasten refused the combination before a training step."""


def fit(c: Combination, model: Model, callbacks: list[Any], ckpt_path: Path | None) -> L.Trainer:
    validation = validation_of(c)
    loaders = [loader_of(c)] + ([validation if c.two_loaders else validation[0]] if c.validation != "none" else [])
    trainer = trainer_of(c, callbacks)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seed_all(c.seed if ckpt_path is None else c.seed + 1)
    try:
        trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    except (ValueError, TypeError, RuntimeError) as error:
        untouched = ckpt_path is not None or all(
            torch.equal(a.double(), b.double()) for a, b in zip(before, model.parameters(), strict=True)
        )
        if model.steps == 0 and untouched:
            raise Refused(str(error)) from error
        raise
    return trainer


def train_with_fabric(c: Combination) -> Model:
    model = model_of(c)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=c.precision)
    if c.lever == "in_backward":
        plain: Any = in_backward(torch.optim.AdamW, model.parameters(), lr=0.01)
    else:
        plain = optimizer_of(c, model)
    module, optimizer = fabric.setup(model, plain)
    module.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(loader_of(c))
    seed_all(c.seed)
    for _ in range(c.epochs):
        batches = list(loader)
        for index, batch in enumerate(batches):
            start = index - index % c.accumulate
            size = min(c.accumulate, len(batches) - start)
            closes = index + 1 == start + size

            def forward_backward(batch: Any = batch, opens: bool = index == start, size: int = size) -> Any:
                loss = module.loss(batch)
                if opens:
                    optimizer.zero_grad()
                fabric.backward(loss / size if size > 1 else loss)
                return loss

            def finish() -> None:
                if c.clip == "norm":
                    fabric.clip_gradients(module, optimizer, max_norm=0.05)
                elif c.clip == "value":
                    fabric.clip_gradients(module, optimizer, clip_val=0.05)

            if c.optimizer == "lbfgs" and closes:

                def closure(forward_backward: Any = forward_backward, finish: Any = finish) -> Any:
                    loss = forward_backward(opens=True)
                    finish()
                    return loss

                optimizer.step(closure)
                continue
            with fabric.no_backward_sync(module, enabled=not closes):
                forward_backward()
            if closes:
                finish()
                optimizer.step()
    return model


# -- the comparison


# What may be refused, and a word of the reason.
REFUSALS: list[tuple[Callable[[Combination], bool], str]] = [
    (lambda c: c.optimizer == "lbfgs" and c.accumulate > 1, "accumulat"),
    (lambda c: c.lever == "in_backward", "in_backward"),
    (lambda c: c.lever == "micro_batch", "micro_batch"),
    (lambda c: c.validation == "every2", "val_check_interval"),
    (lambda c: c.lever == "packed" and c.loop == "manual", "packed"),
    (lambda c: c.lever == "memory" and c.factors in ("own", "counter"), "memory"),
]


def check(c: Combination) -> str:
    """Return "equal", "resumed equal" or "refused: ..."; raise AssertionError where the weights differ."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            return _compare(c, Path(folder) / "a.ckpt")
        except Refused as refused:
            for applies, word in REFUSALS:
                if applies(c) and word.lower() in str(refused).lower():
                    return f"refused: {str(refused).splitlines()[0][:70]}"
            raise AssertionError(f"refused without an expected reason: {refused}\n{c}") from refused


def _compare(c: Combination, path: Path) -> str:
    if c.loop == "fabric":
        hand = ByHand(c)
        hand.train()
        _same(c, hand.model, train_with_fabric(c), "with Fabric")
        return "equal"
    model, change = model_of(c), Change(c)
    callbacks: list[Any] = [change] if c.change != "none" else []
    if c.save_every:
        callbacks.append(saves_often(c, path.with_name("often.ckpt")))
    if c.resume_at is not None:
        callbacks.append(saves(c, path))
    trainer = fit(c, model, callbacks, None)
    hand = ByHand(c)
    hand.train()
    expected = hand.model
    _same(c, expected, model, "in one go")
    _same_values(c, hand, trainer)
    if change.outputs is not None and c.loop == "trainer":
        missing = [index for index, outputs in change.outputs if outputs is None and not _skips(c, index)]
        assert not missing, f"a callback added in mid-run got no outputs of batches {missing}\n{c}"
    if not path.exists():
        return "equal"
    resumed, change = model_of(c), Change(c)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()  # Whatever is right afterwards came from the checkpoint.
    begun = torch.load(path, weights_only=True)["global_step"]
    again = fit(c, resumed, [change] if c.change != "none" else [], path)
    _same(c, expected, resumed, "resumed")
    if again.global_step == begun:
        return "resumed equal"  # Nothing was left to train.
    _same_values(c, hand, again)
    _same_history(c, trainer, again)
    return "resumed equal"


def _skips(c: Combination, index: int) -> bool:
    return c.output == "none" and index % 4 == 1


def _same(c: Combination, expected: Model, model: Model, how: str) -> None:
    one, other = expected.state_dict(), model.state_dict()
    for key, value in one.items():
        got = other[key]
        if c.close:
            same = torch.allclose(value.double(), got.double(), rtol=1e-7, atol=1e-9)
        else:
            same = torch.equal(value, got)
        distance = (value.double() - got.double()).abs().max().item()
        assert same, f"{how}: {key} differs from the loop by hand by {distance:.3g}\n{c}"


def _same_history(c: Combination, whole: L.Trainer, resumed: L.Trainer) -> None:
    rows = [[{k: v for k, v in row.items() if k != "time"} for row in t.history] for t in (whole, resumed)]
    for one, other in itertools.zip_longest(*rows):
        same = one is not None and other is not None and one.keys() == other.keys()
        same = same and all(one[k] == pytest.approx(other[k], rel=1e-6, nan_ok=True) for k in one)
        assert same, f"the row {one} is {other} in the history of the resumed run\n{c}"


def _same_values(c: Combination, hand: ByHand, trainer: L.Trainer) -> None:
    if c.loop != "trainer" or not hand.samples or hand.stops or c.change == "skip_epoch":
        return
    logged = trainer.callback_metrics["loss_epoch"].double()
    mean = hand.mean_loss().double()
    exact = 1e-5 if c.precision != "bf16-true" else 1e-2
    assert torch.allclose(logged, mean, rtol=exact), f"loss_epoch: {logged} was logged, by hand it is {mean}\n{c}"
    for index, expected in enumerate(hand.validated):
        for name in ("val_loss", "val_mean"):
            full = f"{name}/dataloader_idx_{index}" if c.two_loaders else name
            value = trainer.callback_metrics[full].double()
            assert torch.allclose(value, expected, rtol=exact), f"{full}: {value}, by hand it is {expected}\n{c}"
