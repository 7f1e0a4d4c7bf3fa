"""Training on megatron.core: settings, loop, schedule, metrics and checkpoints."""
