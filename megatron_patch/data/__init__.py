"""Data: tokenizer, preprocessing, core's datasets, micro-batches. Importing it imports neither torch nor megatron."""
