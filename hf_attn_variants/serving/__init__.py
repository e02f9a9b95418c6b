"""Comparison of different engines that can serve a model on this CPU."""
