"""Draft heads, trained on a model's own answers."""
