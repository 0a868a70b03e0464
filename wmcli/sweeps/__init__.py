"""Sweeps: many runs from one file, on this machine, on SLURM or on Ray."""
