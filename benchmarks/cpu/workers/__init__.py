"""Engines in processes of their own, each run by the interpreter of its own environment: no imports from Penstock's."""
