"""Thin commands over megatron_patch; each runs as `python -m toolkits.NAME` and has --help and --json FILE."""
