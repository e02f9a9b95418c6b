"""Cross-attention of Transformers models whose beams, and optionally layers, share one cache per sentence."""
