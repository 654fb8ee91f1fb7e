"""Measurements, each `python -m benchmarks.<name>`: prints a table, writes JSON into benchmarks/results."""
