"""Mechanisms that replace a part of attention, each with its paper."""
