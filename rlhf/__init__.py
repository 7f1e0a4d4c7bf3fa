"""Reinforcement learning from feedback on megatron_patch models: pure losses and advantages, one readable loop per algorithm."""
