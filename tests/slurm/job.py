"""Custom model and data for the test jobs: small, with dropout and a configurable step time."""

import itertools
import os
import time
from pathlib import Path

import torch
from torch import nn

from launcher.data.custom import CustomData


class Net(nn.Module):
    _no_split_modules = ["Linear"]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, values):
        return self.layers(values)


def model():
    print(
        f"devices: {os.environ.get('CUDA_VISIBLE_DEVICES')}; threads: {os.environ.get('OMP_NUM_THREADS')}",
        flush=True,
    )
    return Net()


class Sums:
    """A data set of eight random numbers and their sum."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return values, values.sum()


def data(seconds=0.0, fail=None, slow=None, slow_seconds=8.0):
    """seconds: duration of a micro-batch. fail: a file; training fails while it exists.

    slow: a file; while it exists, the first 30 micro-batches of a start take half a second, and
    later ones `slow_seconds`. So a run does not end before it is disturbed.
    """
    number = itertools.count()

    def loss(net, batch):
        held = slow is not None and Path(slow).exists()
        time.sleep((0.5 if next(number) < 30 else slow_seconds) if held else seconds)
        if fail is not None and Path(fail).exists():
            raise ValueError("a failure of this test")
        return ((net(batch["values"]).squeeze(-1) - batch["sums"]) ** 2).sum()

    def collate(samples):
        values, sums = zip(*samples, strict=True)
        return {"values": torch.stack(values), "sums": torch.stack(sums)}

    return CustomData(train=Sums(), collate=collate, loss=loss)
