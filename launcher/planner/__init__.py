"""Memory and speed of a training step before it is run, and the report when memory runs out."""
