"""The integration of the attention mechanisms into the attention modules and the models of Transformers."""
