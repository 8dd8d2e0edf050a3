"""One file a verb of the `launcher` command: `main(arguments) -> exit status`."""
