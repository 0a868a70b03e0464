"""Sweeps: suites of runs from one file, on this machine, SLURM or Ray."""
