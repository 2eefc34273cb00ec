"""Makes the small storytelling model that demonstrations and tests can serve anywhere."""
