"""Models, data and losses of a user's: sums, means, and losses of samples that see each other."""

import torch
from torch import nn

from launcher.data.custom import CustomData

WIDTH = 6


class Net(nn.Module):
    """A network with what one sample may see of the others, or draw."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.BatchNorm1d(16) if kind == "batch_norm" else nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.5) if kind == "dropout" else nn.Identity()
        self.draws = kind == "functional"

    def forward(self, x):
        hidden = self.dropout(self.norm(torch.relu(self.first(x))))
        if self.draws:
            hidden = nn.functional.dropout(hidden, 0.5)
        return self.last(hidden)


def model(kind="plain"):
    return Net(kind)


class Rows:
    """Rows of a few numbers, of different lengths."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1 + index % self.number, WIDTH, generator=generator)


def collate(samples):
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"x": padded, "mask": padded.abs().sum(-1) > 0}


def squares(net, batch):
    return (net(batch["x"].flatten(0, 1)).view(batch["x"].shape) - batch["x"]).square()


def as_sum(net, batch):
    return squares(net, batch)[batch["mask"]].sum()


def as_mean(net, batch):
    return squares(net, batch)[batch["mask"]].mean()


def within_sample(net, batch):
    losses = squares(net, batch).mean(-1) * batch["mask"]
    return (losses.sum(1) / batch["mask"].sum(1)).sum()


def padded(net, batch):
    return (squares(net, batch) + 1).sum()


def contrastive(net, batch):
    outputs = net(batch["x"][:, 0])
    scores = outputs @ outputs.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")


def noisy_mean(net, batch):
    target = batch["x"] + 0.01 * torch.randn_like(batch["x"])
    return (squares(net, batch) + target.square())[batch["mask"]].mean()


def numbers(batch):
    return int(batch["mask"].sum()) * WIDTH


def data(loss="as_sum", number=64, count=False):
    return CustomData(
        train=Rows(number),
        collate=collate,
        loss=globals()[loss],
        targets=numbers if count else None,
    )
