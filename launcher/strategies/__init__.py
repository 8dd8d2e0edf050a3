"""How a model is distributed over the ranks: DDP, FSDP and activation checkpointing."""
