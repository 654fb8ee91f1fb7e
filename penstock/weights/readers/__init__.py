"""Readers of checkpoint files: bytes, names and metadata only. No torch here."""
