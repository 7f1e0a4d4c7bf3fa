"""Jobs as a user runs them: the quickstart, and short scripts for GPU nodes and SLURM, one folder per family."""
