"""This process among the others: environment variables, process group, device, host memory."""
