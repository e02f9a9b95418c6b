"""GLUE: `classification` with the nine tasks' files and scores."""
