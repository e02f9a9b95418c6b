"""Cross-attentions of upstream's own models that read the encoder's outputs once for all layers and beams."""
