"""Ollama's routes about models: the list, what is loaded, what one can do."""
