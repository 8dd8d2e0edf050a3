"""Will it fit: bytes of a training step before it is run, the ladder of strategies, and words where memory ran out all the same."""
