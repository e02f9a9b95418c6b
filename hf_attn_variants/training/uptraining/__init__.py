"""Training on of what was converted, by its task or towards a teacher."""
