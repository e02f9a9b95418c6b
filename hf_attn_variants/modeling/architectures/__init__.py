"""The architectures: a host a file."""
