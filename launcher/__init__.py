"""A distributed training launcher: one recipe, any number of GPUs, the same losses."""

__version__ = "0.1.0"
