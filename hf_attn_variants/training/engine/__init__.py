"""Settings, data loading and the training loop that all training tasks share."""
