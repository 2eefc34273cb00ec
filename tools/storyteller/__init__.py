"""Training of the small storytelling model for demonstrations and tests."""
