"""Other libraries on the same cases, each in the configuration its own documentation gives."""

from __future__ import annotations

import functools
import logging
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import plain
from measure import Batches, Loop, make_network
from trainers import classifier, fabric_loops, trainer_loops


def lightning() -> dict[str, Loop]:
    """Return the loops of Lightning's Trainer and Fabric; ImportError where it is not installed."""
    import lightning as L  # type: ignore[import-not-found]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return {**trainer_loops(L), **fabric_loops(L)}


def methods() -> dict[str, Loop]:
    """Return loops by hand that call the steps of a module, as every Trainer has to."""

    Classifier = classifier(nn.Module)

    def train(batches: Batches) -> nn.Module:
        module = Classifier().train()
        optimizer = module.configure_optimizers()
        for batch_idx, batch in enumerate(batches):
            loss = module.training_step(batch, batch_idx)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network: nn.Module = module.network
        return network

    def validate(batches: Batches) -> nn.Module:
        module = Classifier().eval()
        with torch.inference_mode():
            for batch_idx, batch in enumerate(batches):
                module.validation_step(batch, batch_idx)
        network: nn.Module = module.network
        return network

    return {"train": train, "validate": validate}


def accelerate() -> dict[str, Loop]:
    """Return the loops of Accelerate; ImportError where it is not installed."""
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.state import GradientState  # type: ignore[import-not-found]

    def prepared(accelerator: Accelerator) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=plain.LEARNING_RATE)
        model, optimizer = accelerator.prepare(network, optimizer)
        model.train()
        return network, model, optimizer

    def train(batches: Batches) -> nn.Module:
        accelerator = Accelerator(cpu=True)
        network, model, optimizer = prepared(accelerator)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        return network

    def train_accumulating(batches: Batches) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plain.ACCUMULATE)
        network, model, optimizer = prepared(accelerator)
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        GradientState._reset_state()  # Shared by all accelerators of a process: the next loop starts anew.
        return network

    def train_clipping_norm(batches: Batches) -> nn.Module:
        accelerator = Accelerator(cpu=True)
        network, model, optimizer = prepared(accelerator)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), plain.MAX_NORM)
            optimizer.step()
        return network

    def validate(batches: Batches) -> nn.Module:
        accelerator = Accelerator(cpu=True)
        network = make_network()
        model = accelerator.prepare(network)
        model.eval()
        with torch.inference_mode():
            for x, y in batches:
                F.cross_entropy(model(x), y)
        return network

    return {
        "train": train,
        "fabric": train,
        "accumulate": train_accumulating,
        "clip-norm": train_clipping_norm,
        "validate": validate,
    }


def ignite() -> dict[str, Loop]:
    """Return the loops of Ignite; ImportError where it is not installed."""
    from ignite.engine import Engine, Events  # type: ignore[import-not-found]

    def trained(batches: Batches, *, logs: bool) -> nn.Module:
        network = make_network()
        optimizer = torch.optim.SGD(network.parameters(), lr=plain.LEARNING_RATE)
        network.train()

        def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        engine = Engine(step)
        if logs:
            values: list[float] = []
            engine.on(Events.ITERATION_COMPLETED(every=plain.LOG_EVERY))(
                lambda engine: values.append(engine.state.output.item())
            )
        engine.run(batches, max_epochs=1, epoch_length=len(batches))
        return network

    return {
        "train": functools.partial(trained, logs=False),
        "log": functools.partial(trained, logs=True),
    }


def torchtnt() -> dict[str, Loop]:
    """Return the loop of torchtnt; ImportError where it is not installed."""
    from torchtnt.framework.state import State  # type: ignore[import-not-found]
    from torchtnt.framework.train import train as train_unit  # type: ignore[import-not-found]
    from torchtnt.framework.unit import TrainUnit  # type: ignore[import-not-found]

    class Unit(TrainUnit):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network()
            self.optimizer = torch.optim.SGD(self.network.parameters(), lr=plain.LEARNING_RATE)

        def train_step(self, state: State, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, y = data
            loss = F.cross_entropy(self.network(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    def train(batches: Batches) -> nn.Module:
        unit = Unit()
        train_unit(unit, train_dataloader=batches, max_epochs=1)
        network: nn.Module = unit.network
        return network

    return {"train": train}


PEERS = {"methods": methods, "lightning": lightning, "accelerate": accelerate, "ignite": ignite, "torchtnt": torchtnt}
