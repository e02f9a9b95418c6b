"""Reading and writing checkpoints: tensors from files or models, and into files."""
