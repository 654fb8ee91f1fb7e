"""vLLM's own routes: tokens in and out, what the server is, and those that are answered by name alone."""
