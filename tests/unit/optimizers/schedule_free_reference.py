"""Writes the constants of test_optimizer.py: a run of the package schedulefree, by its authors.

pip install --target FOLDER schedulefree==1.4.1, then
PYTHONPATH=FOLDER python -m tests.unit.optimizers.schedule_free_reference
"""

import torch

from tests.unit.optimizers.test_optimizer import schedule_free_inputs


def main() -> None:
    """Prints the trained weights y and the averages x after the steps of the test."""
    from schedulefree import AdamWScheduleFree  # type: ignore[import-not-found]

    weights, gradients = schedule_free_inputs()
    parameters = [torch.nn.Parameter(values.clone()) for values in weights]
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in parameters]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "warmup_steps": 4, "foreach": False}
    optimizer = AdamWScheduleFree(groups, **options)
    optimizer.train()
    for each in gradients:
        for p, gradient in zip(parameters, each, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    for name, switch in (("y", optimizer.train), ("x", optimizer.eval)):
        switch()
        values = torch.cat([p.detach().flatten() for p in parameters])
        print(f'    "{name}": {[float(f"{value:.8g}") for value in values.tolist()]},')


if __name__ == "__main__":
    main()
