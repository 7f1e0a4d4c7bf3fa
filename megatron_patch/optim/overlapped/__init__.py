"""OverlappedDistributedOptimizer: gradients are reduced bucket by bucket under the backward pass, into shards only (ZeRO-2)."""
