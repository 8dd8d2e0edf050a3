"""A run from start to end: building, training, saving, reporting."""
