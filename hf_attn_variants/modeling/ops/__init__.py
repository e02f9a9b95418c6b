"""Functions of tensors, without module parameters and without a configuration."""
