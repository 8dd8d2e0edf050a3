"""Jobs of Slurm: their script (`render`, `submit`) and their program (`job`, `agent`). No torch."""
