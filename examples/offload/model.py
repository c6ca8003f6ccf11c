"""A small transformer: `make` is what `python -m executor --model` calls."""

import torch
from torch import nn


def make():
    layers = nn.Sequential(
        nn.Embedding(1000, 64),
        *(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)),
        nn.Linear(64, 1000),
    )

    def loss_fn(output, target):  # of one microbatch
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def batches():
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(1000, (8 * 4, 33), generator=generator)  # 8 microbatches of 4
            yield tokens[:, :-1], tokens[:, 1:]

    return layers, loss_fn, batches()
