"""Metrics for people and files: metrics.jsonl, the console, wandb, tensorboard."""
