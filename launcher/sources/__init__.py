"""Where files are, and rows in them: local files and folders, and the Hugging Face hub."""
