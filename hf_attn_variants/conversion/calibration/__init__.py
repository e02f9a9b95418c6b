"""Calibration: the attentions of the original model are recorded on text or audio, and new ones are fitted to them."""
