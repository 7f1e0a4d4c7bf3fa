"""Data: preprocessing, datasets, batches. No process group unless a test starts one."""
