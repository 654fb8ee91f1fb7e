"""Responses that run, in the background too, are kept, and are found again."""
