"""Weights between folders, models and dialects: plan (what goes where), hf (folders), torch_dist (Megatron), convert."""
