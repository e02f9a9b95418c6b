"""Calibration: records the original attention modules on text or audio, and fits new ones to them."""
