"""Sequence classification and regression on a user's own tables; GLUE is this with its tasks' files and scores."""
