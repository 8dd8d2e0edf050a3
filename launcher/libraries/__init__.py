"""What the launcher uses of other libraries that is not part of their interface."""
