"""Mechanisms that replace parts of attention. Each mechanism names its paper."""
