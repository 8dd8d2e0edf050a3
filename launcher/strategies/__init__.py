"""How a model is spread over the ranks: DDP, FSDP and activation checkpointing."""
