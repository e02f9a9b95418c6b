"""Quantization of loaded models on CPUs to int8 linear layers or to bfloat16."""
