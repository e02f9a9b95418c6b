"""Uptraining of converted models on their pretraining objective, on tables, or with a teacher."""
