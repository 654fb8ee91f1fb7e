"""Searching for likely answers, over an engine: beam search."""
