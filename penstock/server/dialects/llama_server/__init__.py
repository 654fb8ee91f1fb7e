"""llama-server's own API: completions, infilling, embeddings and what it tells of itself."""
