"""Cross-attention for Transformers models whose beams, and optionally layers, share one cache per sentence."""
