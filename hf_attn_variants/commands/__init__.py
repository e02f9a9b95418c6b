"""Commands of `attn-variants`, one module per command. Slow imports are inside of the functions `main`."""
