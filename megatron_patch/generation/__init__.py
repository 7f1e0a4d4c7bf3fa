"""Logits and text from a live model under any parallel layout."""
