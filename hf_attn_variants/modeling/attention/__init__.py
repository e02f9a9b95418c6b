"""Where mechanisms are plugged into attention and into a model."""
