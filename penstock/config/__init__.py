"""Frozen options, their resolution, limits, errors and the only reader of environment variables."""
