"""The modeling code that ships with checkpoints. It only imports torch, Transformers and itself."""
