"""Benchmarks, and the result files that they write."""
