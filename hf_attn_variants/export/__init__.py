"""Export of checkpoints to formats that do not need this package: plain Transformers, ONNX and CTranslate2."""
