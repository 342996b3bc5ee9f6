"""What a random combination is made of: its choices, and the data, loader, optimizer and model that follow from them.

``check_combinations`` trains each with hasten and by hand.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import hasten as L
from hasten.optim import in_backward

WIDTH, TIME = 4, 6


@dataclass(frozen=True)
class Combination:
    """One way to train. Each field is one choice."""

    seed: int
    loop: str  # trainer | manual | fabric
    network: str  # linear | dropout | norm | tokens
    optimizer: str
    scheduler: str
    loader: str
    samples: int
    batch_size: int
    shuffle: bool
    workers: int
    epochs: int
    accumulate: int
    clip: str  # none | norm | value
    lever: str
    subclass: str
    output: str  # tensor | dict | weight | none
    change: str
    change_at: tuple[int, int]
    validation: str  # none | epoch | every2
    resume_at: tuple[int, int] | None
    limit: int | None
    max_steps: int
    # A callback accumulates from the second epoch on; the first steps on each batch.
    grows: bool
    # What a part of the network multiplies with: none | python | numpy | own | counter
    factors: str
    # The loss has a gradient with respect to the inputs in it.
    second_order: bool
    # A callback of the program saves after each so many batches; 0 for never.
    save_every: int
    # In which hook the checkpoint is saved that is resumed.
    resume_hook: str
    log_every: int
    two_loaders: bool

    def window(self, epoch: int) -> int:
        """Return over how many batches gradients are accumulated in an epoch."""
        return 1 if self.grows and epoch == 0 else self.accumulate

    @property
    def close(self) -> bool:
        """Whether sums are taken in another order than by hand: then in float64, and within its rounding."""
        return (
            self.lever in ("micro_batch", "compile", "packed", "64-true")
            or self.output == "weight"
            or (self.loader in UNKNOWN_LENGTH and self.loop != "fabric")
        )

    @property
    def precision(self) -> str:
        if self.lever in ("bf16-mixed", "bf16-true"):
            return self.lever
        return "64-true" if self.close else "32-true"

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


# hasten learns how many batches there are from the last one, so the tail of an accumulation is rounded differently.
UNKNOWN_LENGTH = ("iterable", "iterable+len", "iterable+short", "iterable+long", "short", "long", "generator")


def draw(seed: int) -> Combination:
    """Return the combination of a seed; what contradicts itself by hand, too, is not drawn."""
    choose = random.Random(seed)

    def one_of(*choices: Any, plain: float = 0.0) -> Any:
        return choices[0] if choose.random() < plain else choose.choice(choices)

    loop = one_of("trainer", "manual", "fabric", plain=0.7)
    lever = one_of(
        "none", "fused", "resident", "memory", "micro_batch", "compile", "packed", "bf16-mixed", "64-true",
        "in_backward", "bf16-true", plain=0.4,
    )  # fmt: skip
    if lever == "compile" and choose.random() < 0.8:
        lever = "none"  # It takes a second.
    if loop == "fabric" and lever in ("64-true", "bf16-true"):
        lever = "none"  # Fabric gives outputs back in 32 bits.
    if loop != "trainer" and lever in ("resident", "memory", "micro_batch", "packed", "compile"):
        lever = "none"
    network = one_of("dropout", "linear", "norm", "tokens")
    if lever in ("packed", "memory"):
        network = "tokens"  # Both work on repeated blocks.
    if lever == "micro_batch" and network in ("dropout", "norm"):
        network = "linear"
    if network == "tokens" and lever == "compile":
        network = "linear"
    loader = one_of(
        "map", "map", "drop_last", "list", "iterable", "iterable+len", "iterable+short", "iterable+long",
        "short", "long", "generator", "batch_sampler", plain=0.4,
    )  # fmt: skip
    if lever == "resident":
        loader = one_of("map", "drop_last", "batch_sampler")
    if loop == "manual" and lever == "in_backward":
        lever = "none"
    if loop == "fabric" and loader in ("list", "short", "long", "generator"):
        loader = "map"  # Fabric sets up loaders of PyTorch.
    workers = choose.choice((1, 2)) if choose.random() < 0.12 and lever != "resident" else 0
    if loader in ("list", "short", "long", "generator"):
        workers = 0
    batch_size = choose.randint(1, 4)
    batches = choose.randint(1, 9)
    samples = max(1, batches * batch_size - choose.randint(0, batch_size - 1))
    if loader == "drop_last":
        samples = max(samples, batch_size)
    if network == "norm":
        if loader.startswith("iterable"):
            workers = 0  # Shared among workers, a batch may have one sample left, of which there is no variance.
        batch_size = max(2, batch_size)
        samples = max(2, samples - samples % batch_size) if loader != "list" else batch_size * batches
    epochs = choose.randint(1, 3)
    optimizer = one_of(
        "sgd", "adamw", "rmsprop", "noisy", "wrapped", "patched", "hooked", "zero_kept", "lbfgs", "two_groups",
        plain=0.3,
    )  # fmt: skip
    if lever in ("fused", "in_backward"):
        optimizer = "adamw"
    accumulate = one_of(1, 2, 3, 4, plain=0.35)
    if loop == "fabric" and (optimizer == "lbfgs" or lever == "in_backward"):
        accumulate = 1
    change = one_of(
        "none", "lr", "clip", "step", "optimizer", "freeze", "callback", "stop", "skip_epoch", "hook",
        "scheduler_off", "eval", "zero", plain=0.45,
    )  # fmt: skip
    if loop == "fabric" or (change in ("clip", "hook") and lever == "in_backward"):
        change = "none"
    change_at = (choose.randrange(epochs), choose.randrange(batches))
    resume_at = None
    if loop != "fabric" and choose.random() < 0.4:
        resume_at = (choose.randrange(epochs), choose.randrange(batches))
        if change not in ("none", "freeze", "eval", "zero") and resume_at >= change_at:
            # What a callback changed by then is not in a checkpoint, and does not happen again.
            resume_at = None
    scheduler = one_of("none", "epoch", "step", "plateau", plain=0.4) if loop == "trainer" else "none"
    if scheduler == "plateau" and change == "skip_epoch":
        scheduler = "none"  # There would be no value to act on.
    subclass = one_of("none", "optimizer_step", "zero_grad", "clipping", "backward", "before_step", plain=0.4)
    output = one_of("tensor", "dict", "weight", "none", plain=0.5)
    if loop != "trainer":
        subclass, output = "none", "tensor"
    if lever == "in_backward" and subclass == "before_step":
        subclass = "none"  # There are no gradients to change.
    if optimizer == "lbfgs" and output == "none":
        output = "tensor"  # torch's LBFGS needs a loss from each call of its closure.
    validation = one_of("none", "epoch", "every2", plain=0.5) if loop != "fabric" else "none"
    if validation == "every2" and loader.endswith(("short", "long")):
        validation = "epoch"  # Every second batch of how many?
    if lever == "bf16-mixed" and (output == "weight" or loader in UNKNOWN_LENGTH):
        lever = "none"  # A last bit of a sum may become a bit of 7.
    if lever == "bf16-true":
        if loop != "trainer" or network == "norm" or output == "weight" or loader in UNKNOWN_LENGTH:
            lever = "none"
        elif optimizer not in ("sgd", "adamw", "rmsprop", "two_groups") or subclass in ("zero_grad", "optimizer_step"):
            optimizer, subclass = "sgd", "none"
        if change in ("optimizer", "hook"):
            change = "none"
    clip = one_of("none", "norm", "value", plain=0.5)
    limit = choose.randint(1, batches) if choose.random() < 0.15 and loop != "fabric" else None
    max_steps, grows = -1, False
    if loop == "trainer":
        max_steps = choose.randint(1, epochs * batches) if choose.random() < 0.15 else -1
        grows = choose.random() < 0.15 and accumulate > 1 and lever != "in_backward"
    factors = one_of("none", "python", "numpy", "own", "counter", plain=0.5)
    if lever in ("compile", "packed", "micro_batch") or optimizer == "lbfgs":
        factors = "none"  # Drawn once for each sample, or for each call of the closure.
    second_order = choose.random() < 0.25 and network != "tokens" and lever not in ("compile", "micro_batch", "packed")
    save_every = choose.choice((0, 0, 0, 1, 3)) if loop != "fabric" else 0
    resume_hook = one_of("on_train_batch_end", "on_before_backward", plain=0.5)
    if loop != "trainer" or optimizer == "lbfgs" or lever in ("in_backward", "micro_batch") or output == "none":
        resume_hook = "on_train_batch_end"
    log_every = choose.choice((1, 1, 2, 3))
    two_loaders = choose.random() < 0.3 and validation != "none"
    return Combination(
        seed=seed,
        loop=loop,
        network=network,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        samples=samples,
        batch_size=batch_size,
        shuffle=choose.random() < 0.6 and loader in ("map", "drop_last"),
        workers=workers,
        epochs=epochs,
        accumulate=accumulate,
        clip="none" if loop == "fabric" and lever == "in_backward" else clip,
        lever=lever,
        subclass=subclass,
        output=output,
        change=change,
        change_at=change_at,
        validation=validation,
        resume_at=resume_at,
        limit=limit,
        max_steps=max_steps,
        grows=grows,
        factors=factors,
        second_order=second_order,
        save_every=save_every,
        resume_hook=resume_hook,
        log_every=log_every,
        two_loaders=two_loaders,
    )


# -- data


class Stream(IterableDataset[Any]):
    """Samples shared out among workers, as torch's documentation does; ``length`` may be wrong."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, len(self.data), every):
            yield self.data[index]


class Sized(Stream):
    def __init__(self, data: TensorDataset, length: int) -> None:
        super().__init__(data)
        self.length = length

    def __len__(self) -> int:
        return self.length


class Reported:
    """Batches in a loader of the user's own that reports ``length``."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.items, self.length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return self.length


class Unsized:
    def __init__(self, batches: list[Any]) -> None:
        self.items = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


def data_of(c: Combination, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(c.seed + seed)
    y = torch.randint(0, 2, (c.samples,), generator=generator)
    if c.network != "tokens":
        return TensorDataset(torch.randn(c.samples, WIDTH, generator=generator), y)
    lengths = torch.randint(2, TIME + 1, (c.samples,), generator=generator)
    mask = torch.arange(TIME)[None] < lengths[:, None]
    return TensorDataset(torch.randint(1, 9, (c.samples, TIME), generator=generator) * mask, y)


def loader_of(c: Combination) -> Any:
    """Return a new loader over the data of ``c``; two of them give the same batches under the same seed."""
    data, size = data_of(c), c.batch_size
    options: dict[str, Any] = {"num_workers": c.workers}
    if c.workers and c.samples % 2:
        options["persistent_workers"] = True
    count = -(-c.samples // size)
    if c.loader in ("map", "drop_last"):
        return DataLoader(data, size, shuffle=c.shuffle, drop_last=c.loader == "drop_last", **options)
    if c.loader == "batch_sampler":
        indices = list(range(c.samples))
        random.Random(c.seed).shuffle(indices)
        batches = [indices[i : i + size] for i in range(0, c.samples, size)]
        return DataLoader(data, batch_sampler=batches, **options)
    if c.loader == "iterable":
        return DataLoader(Stream(data), size, **options)
    if c.loader.startswith("iterable+"):
        wrong = {"len": 0, "short": -size, "long": size}[c.loader.partition("+")[2]]
        return DataLoader(Sized(data, max(1, c.samples + wrong)), size, **options)
    plain = list(DataLoader(data, size, generator=torch.Generator()))
    if c.loader == "list":
        return plain
    if c.loader == "generator":
        return Unsized(plain)
    return Reported(plain, {"short": max(1, count - 1), "long": count + 1}[c.loader])


def validation_of(c: Combination) -> list[Any]:
    """Return one loader, or two."""
    return [DataLoader(data_of(c, seed=1 + index), 3) for index in range(2 if c.two_loaders else 1)]


# -- the model


class Factors(nn.Module):
    """Multiplies with a number that it draws, or counts, while it trains."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.kind == "none":
            return x
        if self.kind == "counter":
            self.calls += 1
            return x / (1 + self.calls % 3)
        draw: dict[str, Callable[[], Any]] = {
            "python": random.random,
            "numpy": np.random.random,
            "own": lambda: torch.rand((), generator=self.generator, dtype=torch.float64).item(),
        }
        return x * (0.5 + float(draw[self.kind]()))


class Block(nn.TransformerEncoderLayer):
    def __init__(self, factors: str) -> None:
        super().__init__(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.factors = Factors(factors)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.factors(super().forward(*args, **kwargs))


class Tokens(nn.Module):
    def __init__(self, factors: str = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        if factors != "none":
            block = Block(factors)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        real = (~padding)[..., None]
        return self.head((hidden * real).sum(1) / real.sum(1))


def network_of(name: str, factors: str) -> nn.Module:
    if name == "tokens":
        return Tokens(factors)
    middle = {"linear": nn.Tanh(), "dropout": nn.Dropout(0.3), "norm": nn.BatchNorm1d(8)}[name]
    return nn.Sequential(nn.Linear(WIDTH, 8), middle, nn.Linear(8, 2), Factors(factors))


class Noisy(torch.optim.SGD):
    """Adds noise to each step, as Langevin dynamics do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return loss


class Wrapped(torch.optim.SGD):
    """Steps twice as far, with the attributes of the step that it wraps."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


class ZeroKept(torch.optim.SGD):
    """Keeps gradients of zeros in place of none."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def optimizer_of(c: Combination, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``c``, the same one for both sides."""
    parameters = list(module.parameters())
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "weight_decay": 0.1}]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=c.lever == "fused"),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=0.01),
        "noisy": lambda: Noisy(parameters, lr=0.1),
        "wrapped": lambda: Wrapped(parameters, lr=0.05),
        "zero_kept": lambda: ZeroKept(parameters, lr=0.1, momentum=0.5),
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
        "two_groups": lambda: torch.optim.SGD(groups, lr=0.05),
    }
    if c.lever == "in_backward":
        return torch.optim.AdamW(parameters, lr=0.01)
    if c.optimizer in makers:
        return makers[c.optimizer]()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if c.optimizer == "patched":

        def step(self: torch.optim.SGD, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            type(self).step(self)
            return loss

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    else:
        assert c.optimizer == "hooked"
        optimizer.register_step_post_hook(lambda o, *_: [p.data.mul_(0.99) for p in o.param_groups[0]["params"]])
    return optimizer


def scheduler_of(c: Combination, optimizer: Any) -> Any:
    if c.scheduler == "none":
        return None
    if c.scheduler == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)


class Model(L.LightningModule):
    """What both sides train: by hand only its ``loss`` is called."""

    def __init__(self, c: Combination) -> None:
        super().__init__()
        self.c, self.steps, self.factor = c, 0, 1.0
        torch.manual_seed(c.seed)
        self.net = network_of(c.network, c.factors)
        self.mean = torchmetrics.MeanMetric()
        self.automatic_optimization = c.loop != "manual"

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.c.second_order and torch.is_grad_enabled():
            x = x.detach().requires_grad_(True)
        outputs = self.net(x)
        loss = nn.functional.cross_entropy(outputs, y) * self.factor
        if x.requires_grad:
            (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            loss = loss + 0.1 * gradient.square().mean()
        return loss

    def eval_part(self) -> None:
        """Switch a part to eval mode, for good."""
        (self.net.encoder.layers[0] if self.c.network == "tokens" else self.net[1]).eval()

    def output(self, batch: Any, batch_idx: int) -> Any:
        """Return what training_step returns."""
        if self.c.output == "none" and batch_idx % 4 == 1:
            return None
        loss = self.loss(batch)
        if self.c.output == "dict":
            return {"loss": loss, "more": batch_idx}
        if self.c.output == "weight":
            weight = len(batch[1]) * (1 + batch_idx % 3)
            return {"loss": loss, "loss_weight": torch.tensor(weight, dtype=loss.dtype)}
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if not self.automatic_optimization:
            return self.manual_step(batch, batch_idx)
        output = self.output(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is not None:
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return output

    def manual_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.c.optimizer == "lbfgs":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
            return
        self.manual_backward(self.loss(batch) / self.c.accumulate)
        if (batch_idx + 1) % self.c.accumulate == 0:
            if self.c.clip == "norm":
                # clip_gradients refuses another value than the Trainer's, which a change in mid-run may set.
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=1)
        self.mean(loss)
        self.log("val_mean", self.mean)

    def configure_optimizers(self) -> Any:
        c = self.c
        if c.lever == "in_backward":
            optimizer: Any = in_backward(torch.optim.AdamW, self.parameters(), lr=0.01)
        else:
            optimizer = optimizer_of(c, self)
            if c.lever == "fused" and c.optimizer == "adamw":
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = scheduler_of(c, optimizer)
        if scheduler is None:
            return optimizer
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step" if c.scheduler == "step" else "epoch"}
        if c.scheduler == "plateau":
            config["monitor"] = "loss_epoch"
        return {"optimizer": optimizer, "lr_scheduler": config}


class OwnStep(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        optimizer.step(closure=optimizer_closure)


class OwnZeroGrad(Model):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClipping(Model):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        # clip_gradients refuses another value than the Trainer's.
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.02)


class OwnBackward(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class BeforeStep(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.001)


SUBCLASSES: dict[str, type[Model]] = {
    "none": Model,
    "optimizer_step": OwnStep,
    "zero_grad": OwnZeroGrad,
    "clipping": OwnClipping,
    "backward": OwnBackward,
    "before_step": BeforeStep,
}


def model_of(c: Combination) -> Model:
    return SUBCLASSES[c.subclass](c)
