"""The files that travel to the Hub with every checkpoint; each imports only torch, transformers and its siblings."""
