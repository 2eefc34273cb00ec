"""What is measured, and how a measurement becomes a file."""
