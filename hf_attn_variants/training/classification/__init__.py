"""Classification and regression on the user's own tables. GLUE tasks are subclasses."""
