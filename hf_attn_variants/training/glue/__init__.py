"""Sequence classification on GLUE: the shape of the tasks' folders."""
