"""The code that ships with every checkpoint on the Hub. It imports only torch, Transformers and itself."""
