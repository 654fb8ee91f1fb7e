"""Evaluates a model: perplexity of texts, importance of its weights' inputs."""
