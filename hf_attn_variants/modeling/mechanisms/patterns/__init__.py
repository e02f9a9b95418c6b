"""Attention patterns, which select the keys that a query attends to, with one file per pattern."""
