"""Structured output while answers are made: the grammar compiler, the state of each answer's grammar, masks."""
