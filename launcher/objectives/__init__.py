"""What a run learns from its rows: samples, micro-batches, loss, metrics, evaluation."""
