"""What to serve a model with on this CPU: transformers, shared memory, int8, fewer heads and CTranslate2, timed in turn."""
