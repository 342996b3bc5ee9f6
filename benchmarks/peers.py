"""Other libraries on the same cases, each in the configuration its own documentation gives."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import plain
from measure import Batches, Loop, make_network
from trainers import fabric_loops, trainer_loops


def lightning() -> dict[str, Loop]:
    """Return the loops of Lightning's Trainer and Fabric; ImportError where it is not installed."""
    import lightning as L  # type: ignore[import-not-found]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return {**trainer_loops(L), **fabric_loops(L)}


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


PEERS = {"lightning": lightning, "accelerate": accelerate}
