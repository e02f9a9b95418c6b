"""SuperGLUE: `classification` and `multiple_choice` with the eight tasks' files, scores, wordings and submissions."""
