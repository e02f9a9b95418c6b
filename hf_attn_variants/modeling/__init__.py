"""The modeling code that ships with checkpoints. It depends only on torch and Transformers."""
