"""Jobs of Slurm: the script (`render`), how it gets there (`submit`), and what goes on in it (`agent`, `attempts`). Never imports torch."""
