"""What a variant puts in the place of a part of attention, each with its paper."""
