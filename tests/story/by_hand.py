"""The loop that one writes without a library, for any random combination: what hasten is compared with."""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.story.combinations import Combination, Model, loader_of, model_of, optimizer_of, scheduler_of, validation_of


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class ByHand:
    """Trains the model of a combination; of hasten it uses nothing.

    What a change in mid-run changes are its attributes.
    """

    def __init__(self, c: Combination) -> None:
        self.c = c
        self.model: Model = model_of(c)
        if c.precision == "64-true":
            self.model.double()
        self.is_short = c.precision == "bf16-true"
        if self.is_short:
            self.model.to(torch.bfloat16)
        # The weights that the optimizer steps; those of a model in 16 bits are rounded from them.
        self.stepped: nn.Module = copy.deepcopy(self.model).float() if self.is_short else self.model
        self.optimizer: Any = optimizer_of(c, self.stepped)
        self.scheduler: Any = scheduler_of(c, self.optimizer)
        self.max_norm = 0.05 if c.clip == "norm" else None
        self.max_value = 0.05 if c.clip == "value" else None
        self.doubles_gradients = False
        self.stops = False
        self.steps = 0
        # Of the last epoch: the sum over its samples, and how many they are.
        self.total: Tensor | float = 0.0
        self.samples = 0
        # Of the last validation: the mean of the batches' losses, by loader.
        self.validated: list[Tensor] = []
        self.evals = False

    def train(self) -> None:
        """Train all epochs."""
        c = self.c
        loader, validation = loader_of(c), validation_of(c)
        seed_all(c.seed)
        for epoch in range(c.epochs):
            batches = [self._cast(batch) for batch in itertools.islice(iter(loader), c.limit)]
            ended = self._epoch(epoch, batches, validation)
            if ended and self.scheduler is not None:
                if c.scheduler == "epoch":
                    self.scheduler.step()
                elif c.scheduler == "plateau" and self.samples:
                    self.scheduler.step(self.mean_loss())
            if self.stops:
                return

    def mean_loss(self) -> Tensor:
        """Return the mean loss over the samples of the last epoch."""
        return torch.as_tensor(self.total / self.samples)

    def _epoch(self, epoch: int, batches: list[Any], validation: Any) -> bool:
        """Train on each batch; return whether the epoch came to its end."""
        c = self.c
        self.accumulate = c.window(epoch)
        self.total, self.samples = 0.0, 0
        for index, batch in enumerate(batches):
            if c.change != "none" and (epoch, index) == c.change_at:
                if c.change == "skip_epoch":
                    return True
                self._change()
            if c.loop == "manual":
                self._manual_step(batch, index)
            else:
                self._step(batch, index, len(batches))
            is_last = index + 1 == len(batches)
            if (c.validation == "every2" and index % 2 == 1) or (c.validation == "epoch" and is_last):
                self._validate(validation)
            if self.steps == c.max_steps:
                self.stops = True
            if self.stops:
                return is_last
        return True

    def _step(self, batch: Any, index: int, count: int) -> None:
        """Train on one batch of a window of ``accumulate``; the last window of an epoch may be shorter."""
        c = self.c
        start = index - index % self.accumulate
        size = min(self.accumulate, count - start)
        opens, closes = index == start, index + 1 == start + size
        if not closes:
            self._forward_backward(batch, index, size, opens)
            return
        if c.subclass == "optimizer_step":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.97

        def closure() -> Tensor | None:
            loss = self._forward_backward(batch, index, size, opens)
            self._finish_gradients()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self._step_weights()
        self.steps += 1
        if c.scheduler == "step" and self.scheduler is not None:
            self.scheduler.step()

    def _step_weights(self) -> None:
        pairs = list(zip(self.model.parameters(), self.stepped.parameters(), strict=True))
        if self.is_short:
            for parameter, full in pairs:
                full.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        if self.is_short:
            for parameter, full in pairs:
                parameter.data.copy_(full)

    def _forward_backward(self, batch: Any, index: int, size: int, opens: bool) -> Tensor | None:
        c = self.c
        with self._autocast():
            output = self.model.output(batch, index)
        if opens:
            self.weight = 0.0
            (self.model if self.is_short else self.optimizer).zero_grad(set_to_none=c.subclass != "zero_grad")
        if output is None:
            return None
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        self.total = self.total + loss.detach() * len(batch[1])
        self.samples += len(batch[1])
        if c.output == "weight" and self.accumulate > 1:
            self.weight += float(output["loss_weight"])
            scaled = loss * output["loss_weight"]
        else:
            scaled = loss / size if size > 1 else loss
        (scaled * 2 if c.subclass == "backward" else scaled).backward()
        return loss

    def _finish_gradients(self) -> None:
        c = self.c
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            if c.output == "weight" and self.accumulate > 1:
                gradient.mul_(1.0 / self.weight)
            if self.doubles_gradients:
                gradient.mul_(2)
            if c.subclass == "before_step":
                gradient.add_(0.001)
        trained = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if self.is_short:
            trained = [p for p in self.model.parameters() if p.grad is not None]
        if c.subclass == "clipping":
            nn.utils.clip_grad_norm_(trained, 0.02)
        elif self.max_norm is not None:
            nn.utils.clip_grad_norm_(trained, self.max_norm)
        elif self.max_value is not None and trained:
            nn.utils.clip_grad_value_(trained, self.max_value)

    def _manual_step(self, batch: Any, index: int) -> None:
        """The same as ``Model.manual_step``, which counts windows over the end of a loader's batches."""
        c, optimizer = self.c, self.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):

            def closure() -> Tensor:
                optimizer.zero_grad()
                with self._autocast():
                    loss = self.model.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            return
        with self._autocast():
            loss = self.model.loss(batch) / c.accumulate
        loss.backward()
        if (index + 1) % c.accumulate == 0:
            if c.clip == "norm":
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
            if self.doubles_gradients:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()

    def _change(self) -> None:
        change = self.c.change
        if change == "lr":
            self.optimizer.param_groups[0]["lr"] = 0.03
        elif change == "clip":
            if self.c.clip == "value":
                self.max_value = 0.001
            else:
                self.max_norm = 0.001
        elif change == "step":
            self.model.factor = 3.0
        elif change == "optimizer":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        elif change == "freeze":
            next(self.model.parameters()).requires_grad_(False)
        elif change == "eval":
            self.evals = True
            self.model.eval_part()
        elif change == "zero":
            for module in {self.model, self.stepped}:
                next(module.parameters()).data.zero_()
        elif change == "hook":
            self.doubles_gradients = True
        elif change == "scheduler_off":
            self.scheduler = None
        elif change == "stop":
            self.stops = True

    def _validate(self, validation: Any) -> None:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            self.validated = [
                torch.stack([self.model.loss(self._cast(batch)).double() for batch in loader]).mean()
                for loader in validation
            ]
        self.model.train()
        if self.evals:
            self.model.eval_part()

    def _cast(self, batch: Any) -> Any:
        dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(self.c.precision)
        if dtype is None:
            return batch
        return [part.to(dtype) if part.is_floating_point() else part for part in batch]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.c.precision == "bf16-mixed":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()
