"""Integration of the attention mechanisms into the attention modules and models of Transformers."""
