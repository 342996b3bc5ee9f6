"""The loop a good engineer writes by hand: the reference every row of the ladder is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = Mapping[str, Tensor]


def train(
    model: nn.Module,
    loader: Iterable[Batch],
    optimizer: Optimizer,
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    epochs: int,
    device: torch.device,
) -> None:
    """Train in fp32 with nothing but PyTorch.

    Args:
        model: what to train; on ``device`` already.
        loader: gives batches, mappings of tensors; gone through once an epoch.
        optimizer: of the model's parameters.
        loss: of the model on a batch, a 0-d tensor.
        epochs: how often to go through the loader.
        device: where to compute.

    """
    model.train()
    for _ in range(epochs):
        for batch in loader:
            on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            optimizer.zero_grad()
            loss(model, on_device).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(
    model: nn.Module,
    loader: Iterable[Batch],
    logits: Callable[[nn.Module, Batch], Tensor],
    *,
    device: torch.device,
) -> float:
    """The share of samples whose largest logit is their label's, 0 to 1."""
    model.eval()
    right = seen = 0
    for batch in loader:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        guesses = logits(model, on_device).argmax(dim=-1)
        right += int((guesses == on_device["labels"]).sum())
        seen += len(guesses)
    return right / seen
