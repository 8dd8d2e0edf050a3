"""An example of model.builder and data.builder: an image classifier and its data."""

import torch
from torch import nn

from launcher.data.custom import CustomData


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, images):
        return images + torch.relu(self.norm(self.conv(images)))


class Net(nn.Module):
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, channels, depth, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def model(channels=8, depth=2):
    return Net(channels, depth, classes=2)


class Bars:
    """8 x 8 images with a vertical (label 0) or horizontal (label 1) bar."""

    def __init__(self, first, number):
        self.first, self.number = first, number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        image = 0.1 * torch.randn(1, 8, 8, generator=generator)
        label, place = (self.first + index) % 2, int(torch.randint(8, (), generator=generator))
        image[0, :, place] += 1.0 - label
        image[0, place, :] += float(label)
        return image, label


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def loss(net, batch):
    return nn.functional.cross_entropy(net(batch["images"]), batch["labels"], reduction="sum")


def data(number=50):
    return CustomData(train=Bars(0, number), validation=Bars(1000, 10), collate=collate, loss=loss)
