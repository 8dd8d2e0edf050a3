"""Checkpoints: folders that are valid or not (files), what is in them (state), writing (save) and reading them (load)."""
