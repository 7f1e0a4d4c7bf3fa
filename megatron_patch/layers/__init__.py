"""Our own modules, attached to upstream's spec by edits: norms and core attention that need no Transformer Engine."""
