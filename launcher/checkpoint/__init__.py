"""Checkpoints: validity (files), content (state), writing, reading, and rules for resuming."""
