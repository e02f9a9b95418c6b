"""What travels to the Hub with every checkpoint, a file a room; it imports torch, transformers and itself alone."""
