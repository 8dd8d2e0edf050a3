"""A run: its setup, the training loop, evaluation, and reports."""
