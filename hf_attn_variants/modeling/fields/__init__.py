"""Configuration fields and their checks."""
