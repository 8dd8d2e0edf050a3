"""Checks of nodes, links and strategies: `launcher doctor` and `launcher selftest`."""
