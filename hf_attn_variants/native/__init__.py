"""Architectures whose Transformers classes support fewer key/value heads, so that conversions need no remote code."""
