"""Context parallel: each GPU has a part of every sequence. python examples/context_parallel.py GPUS."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

import hasten as L

WORDS, LENGTH, WIDTH, HEADS = 32, 256, 64, 4


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # By its full name: within the context, torch replaces it there.
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + attended.transpose(1, 2).flatten(2))


def main(devices: int) -> None:
    # DDP averages the gradients: those of the parts of a sequence, as it does for samples.
    fabric = L.Fabric(devices=devices, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    if fabric.device.type != "cuda":
        raise RuntimeError("context parallel needs GPUs: PyTorch has no attention on CPUs that divides sequences.")
    L.seed_everything(1)
    mesh = init_device_mesh("cuda", (fabric.world_size,))
    model = Decoder()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loss = torch.zeros(())
    for _step in range(100):
        # The same sequences everywhere. To predict is their first token, which one process has.
        tokens = torch.randint(WORDS, (8, LENGTH)).to(fabric.device)
        targets = tokens[:, :1].repeat(1, LENGTH)
        positions = torch.arange(LENGTH, device=fabric.device)
        optimizer.zero_grad()
        # Within the context, each of the tensors is this process's part along the dimension of the sequence.
        with context_parallel(mesh, buffers=[tokens, targets, positions], buffer_seq_dims=[1, 1, 0]):
            loss = functional.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
            fabric.backward(loss)
        optimizer.step()
    fabric.print(f"result: loss {fabric.all_reduce(loss.detach()):.4f} on {fabric.world_size} GPU(s)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
