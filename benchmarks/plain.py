"""The loops one writes by hand: the reference of each case."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from measure import CLASSES, Batches, make_network

LEARNING_RATE = 0.01
LOG_EVERY = 50
ACCUMULATE = 4
MAX_NORM = 1.0
MAX_VALUE = 0.5


def train(batches: Batches) -> nn.Module:
    """Train: forward, backward, step."""
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def train_with_metric_and_bar(batches: Batches) -> nn.Module:
    """Train with a running accuracy, and a bar that shows it and the loss."""
    from torchmetrics.classification import MulticlassAccuracy
    from tqdm import tqdm

    model = make_network()
    accuracy = MulticlassAccuracy(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    with tqdm(batches) as bar:
        for step, (x, y) in enumerate(bar, start=1):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            batch_accuracy = accuracy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                bar.set_postfix(loss=loss.item(), accuracy=batch_accuracy.item(), refresh=False)
    accuracy.compute()
    return model


def train_accumulating(batches: Batches) -> nn.Module:
    """Train with one optimizer step for several batches."""
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    last = len(batches) - 1
    tail_start = len(batches) - len(batches) % ACCUMULATE
    tail = len(batches) % ACCUMULATE
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / (ACCUMULATE if i < tail_start else tail)
        loss.backward()
        if (i + 1) % ACCUMULATE == 0 or i == last:
            optimizer.step()
            optimizer.zero_grad()
    return model


def train_clipping_norm(batches: Batches) -> nn.Module:
    """Train with gradients clipped by norm."""
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


def train_clipping_value(batches: Batches) -> nn.Module:
    """Train with gradients clipped by value."""
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        optimizer.step()
    return model


def validate(batches: Batches) -> nn.Module:
    """Evaluate without keeping anything."""
    model = make_network()
    model.eval()
    with torch.inference_mode():
        for x, y in batches:
            F.cross_entropy(model(x), y)
    return model


def validate_with_mean(batches: Batches) -> nn.Module:
    """Evaluate and take the mean of the loss over all samples."""
    model = make_network()
    model.eval()
    total, samples = torch.zeros(()), 0
    with torch.inference_mode():
        for x, y in batches:
            total += F.cross_entropy(model(x), y) * len(y)
            samples += len(y)
    float(total / samples)
    return model
