"""Live models whose linear maps are int8, or that are bfloat16, on a CPU."""
