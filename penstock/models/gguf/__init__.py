"""Families as GGUF files have them: their configurations, names of tensors, and what converters change. No torch."""
