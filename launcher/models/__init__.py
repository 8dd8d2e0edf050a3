"""The model: built on meta, given weights where they will stay, written out. Knows transformers."""
