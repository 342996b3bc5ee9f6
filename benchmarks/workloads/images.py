"""Two models on images: a small ResNet-18 and a Vision Transformer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from benchmarks.workloads.task import SEED, Workload, index_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hasten_tools.demo.images import VisionTransformer

SIDE, CLASSES = 32, 10
COPIES, HELD_OUT, HELD_OUT_COPIES = 12, 360, 4


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of bytes ``(count, 1, 32, 32)``; a sample is made of floats when it is read, as ``ToTensor`` does."""

    def __init__(self, pictures: Tensor, labels: Tensor) -> None:
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pictures[index].float() / 127.5 - 1.0, int(self.labels[index])


def read_pictures() -> tuple[Pictures, Pictures]:
    """Return pictures to train and to test on: scikit-learn's digits turned, moved and noisy, or generated ones."""
    generator = torch.Generator().manual_seed(SEED)
    if importlib.util.find_spec("sklearn") is None:
        return stripes(17_000, generator), stripes(1_400, generator)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=generator)
    train, test = order[HELD_OUT:].repeat(COPIES), order[:HELD_OUT].repeat(HELD_OUT_COPIES)
    parts = [Pictures(distorted(images[part], generator), labels[part]) for part in (train, test)]
    return parts[0], parts[1]


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images made 32 pixels wide, each turned, scaled, moved and noisy in its own way, as bytes."""
    turn, scale, right, down = torch.rand(4, len(images), generator=generator)
    angle, zoom = (turn - 0.5) * 0.9, 1.0 + scale * 0.5
    rows = [angle.cos() * zoom, -angle.sin() * zoom, right * 0.5 - 0.25]
    rows += [angle.sin() * zoom, angle.cos() * zoom, down * 0.5 - 0.25]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [len(images), 1, SIDE, SIDE], align_corners=False)
    moved = F.grid_sample(images, grid, mode="bilinear", align_corners=False)
    noise = torch.randn(moved.shape, generator=generator) * 0.15
    return ((moved + noise).clamp(0, 1) * 255).to(torch.uint8)


def stripes(count: int, generator: torch.Generator) -> Pictures:
    """Return noisy stripes, whose direction is the class."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    direction = (labels + torch.rand(count, generator=generator) * 0.5) * (torch.pi / CLASSES)
    place = torch.linspace(-1, 1, SIDE)
    across = direction.cos()[:, None, None] * place + direction.sin()[:, None, None] * place[:, None]
    phase = torch.rand(count, 1, 1, generator=generator) * 6.3
    pictures = (across * 12 + phase).sin() * 0.3 + torch.randn(across.shape, generator=generator) * 0.2 + 0.5
    return Pictures((pictures.clamp(0, 1) * 255).to(torch.uint8).unsqueeze(1), labels)


class ImageWorkload(Workload):
    """Classify pictures of 32 x 32; how they are turned and moved is drawn once, beforehand."""

    best: ClassVar[Mapping[str, Any]] = {"resident": True, "allocator": "keep", "fused_optimizer": True}
    memory_format: torch.memory_format = torch.contiguous_format

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.train_data, self._held_out = read_pictures()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    def engineers_batches(self) -> Iterator[Any]:
        """Make floats of some pictures at a time; all of them are one tensor of bytes on the device."""
        pictures, labels = self.train_data.pictures.to(self.device), self.train_data.labels.to(self.device)
        for indices in index_batches(len(labels), self.batch_size):
            chosen = indices.to(self.device)
            x = (pictures[chosen].float() / 127.5 - 1.0).to(memory_format=self.memory_format)
            yield x, labels[chosen]

    def quality(self, model: nn.Module) -> float:
        copy, correct = self.copy_of(model), []
        with torch.no_grad():
            for x, y in DataLoader(self._held_out, 128):
                correct.append(copy(x.to(self.device)).argmax(-1).cpu() == y)
        return torch.cat(correct).double().mean().item()


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class ResNet(ImageWorkload):
    """ResNet-18 for small pictures, with a quarter of the channels."""

    name = "resnet"
    title = "ResNet-18 with 16 to 128 channels (0.7 M parameters) on digits of 32 x 32, batches of 64"
    goal, goal_text = 0.95, "accuracy 0.95 on other digits"
    batch_size, learning_rate = 64, 2e-3
    max_steps, turn_steps, quick_steps = 360, 20, 4
    memory_format = torch.channels_last

    def build(self, *, modern: bool) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
            layers += [Residual(channels, outputs, stride), Residual(outputs, outputs, 1)]
            channels = outputs
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
        model = nn.Sequential(*layers)
        # ``to`` with a memory format is known to type checkers in another form only.
        return cast(nn.Module, model.to(memory_format=torch.channels_last)) if modern else model  # type: ignore[call-overload]


class ViT(ImageWorkload):
    """A Vision Transformer of torch's own layers, which attend in one kernel, without dropout."""

    name = "vit"
    title = "Vision Transformer of 6 blocks of 192 (2.7 M parameters) on digits of 32 x 32, batches of 32"
    goal, goal_text = 0.55, "accuracy 0.55 on other digits"
    batch_size, learning_rate = 32, 5e-4
    max_steps, turn_steps, quick_steps = 300, 25, 4
    attends = True

    def build(self, *, modern: bool) -> nn.Module:
        return VisionTransformer(SIDE, patch=4, width=192, depth=6, heads=3, hidden=768, dropout=0.0)
