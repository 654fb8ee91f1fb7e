"""Ollama's native API, for the one model that is served."""
