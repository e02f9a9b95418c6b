"""Quantization of loaded models for inference on CPUs: int8 linear layers, or the whole model in bfloat16."""
