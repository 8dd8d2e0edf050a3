"""The run: set up, trained, evaluated, reported."""
