"""How else one could decode over the same cache: each peer is one function."""
