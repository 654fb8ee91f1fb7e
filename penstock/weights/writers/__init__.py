"""Writing models: GGUF files and Hugging Face folders."""
