"""OverlappedDistributedOptimizer: gradients are reduced bucket by bucket under the backward pass, into shards only (ZeRO-2)."""

BUFFERS = 3  # as large as a bucket each, in which gradients are whole
