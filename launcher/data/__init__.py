"""From files to batches: sources, tokenization, packing, the loader."""
