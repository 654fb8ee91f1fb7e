"""What a model is worth: perplexity of texts, importance of its weights' inputs."""
