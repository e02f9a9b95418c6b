"""Text-to-text tasks: translation, summarization, tables, and GLUE and SQuAD as text."""
