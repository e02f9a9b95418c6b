"""Checkpoints for those who run no code of ours: plain transformers, ONNX graphs, CTranslate2."""
