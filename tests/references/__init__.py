"""Short PyTorch models of families that Transformers does not ship: the oracles that parity tests compare with."""
