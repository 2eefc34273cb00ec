"""Benchmarks, and their results as tables and files."""
