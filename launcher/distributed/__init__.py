"""Environment variables, process group, device, host memory."""
