"""OverlappedDistributedOptimizer: gradients are reduced bucket by bucket under the backward pass, into shards only (ZeRO-2)."""

BUFFERS = 3  # as large as a bucket each, in which gradients are whole
SUMS = 4 * BUFFERS  # of several micro-batches that are on their way at once: a sum has a place of its own, not so what is received
