"""Comparison of the engines that can serve a model on this CPU."""
