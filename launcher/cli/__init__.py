"""The `launcher` command: one module per subcommand, whose function returns the exit status."""
