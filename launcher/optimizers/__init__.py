"""Optimizers, their state in low precision or host memory, and the learning-rate schedule."""
