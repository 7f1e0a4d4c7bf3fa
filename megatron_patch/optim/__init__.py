"""Optimizers: an Adam with FusedAdam's interface, and upstream's distributed optimizer with its checkpoint faults fixed."""
