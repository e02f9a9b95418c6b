"""Checkpoints for those who run no code of ours: plain transformers (`plain`), ONNX graphs (`onnx`)."""
