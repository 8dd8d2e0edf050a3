"""A model that initializes its parameters in all the ways that model code uses."""

import torch
from torch import nn


class Odd(nn.Module):
    """Uses torch.nn.init, arithmetic, assignments to rows, and copies of other tensors."""

    def __init__(self, scalar_shape=()):
        super().__init__()
        shapes = {"normal": (7, 5), "uniform": (7, 5), "cut": (301, 40), "padded": (9, 4)}
        shapes |= {"scaled": (40, 50), "orthogonal": (6, 6), "copied": (5, 3), "sorted": (8,)}
        shapes |= {"scalar": scalar_shape, "doubled": (7, 5)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def reset_parameters(self):
        nn.init.normal_(self.normal, 1.0, 0.5)
        nn.init.uniform_(self.uniform, -3, -1)
        nn.init.trunc_normal_(self.cut, std=0.02)  # limits of 100 standard deviations
        nn.init.xavier_uniform_(self.padded)
        nn.init.zeros_(self.padded[3])
        self.padded.data[-1].fill_(7)
        nn.init.kaiming_normal_(self.scaled).mul_(2).add_(1).clamp_(0.9, 1.1)
        nn.init.orthogonal_(self.orthogonal)
        with torch.no_grad():
            self.copied.copy_(torch.randn(5, 3))
            self.sorted.copy_(self.sorted.normal_().sort().values)
        nn.init.constant_(self.scalar, 3.0)
        nn.init.normal_(self.doubled)
        self.doubled.data = self.doubled.data * 2
