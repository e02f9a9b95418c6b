"""The fields of a configuration, and their checks."""
