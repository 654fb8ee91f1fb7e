"""Chat templates of models that are made or pulled: Go's, as Ollama has them, become Jinja."""
