"""The recipe: its schema, how it is loaded, and the rules that join its keys."""
