"""Extractive question answering on SQuAD."""
