"""Multiple choice: which of a question's choices is right, on a user's own tables; RACE and SWAG are known."""
