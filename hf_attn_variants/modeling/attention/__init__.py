"""Integrates the attention mechanisms into Transformers attention modules and models."""
