"""Which keys a query reads: a pattern a file."""
