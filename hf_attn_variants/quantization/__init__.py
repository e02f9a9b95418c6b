"""Quantization of loaded models to int8 linear layers or to bfloat16, for inference on CPUs."""
