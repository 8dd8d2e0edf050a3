"""The run directory, its lock, failures, hangs and requests to stop."""
