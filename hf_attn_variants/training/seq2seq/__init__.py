"""Text to text: parallel text and tables, GLUE and SQuAD in words."""
