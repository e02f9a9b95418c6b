"""Fine-tuning on the nine tasks of GLUE."""
