"""The supported architectures, with one modeling file per architecture."""
