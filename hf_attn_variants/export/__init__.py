"""Exports checkpoints to formats that do not require this package: plain Transformers, ONNX and CTranslate2."""
