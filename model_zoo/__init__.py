"""One short file per family: what Hugging Face calls each config field and each parameter. Found by megatron_patch.registry."""
