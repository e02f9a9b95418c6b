"""The size and the loss of the variants of a checkpoint, measured without writing them."""
