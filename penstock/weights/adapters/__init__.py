"""Reads low-rank adapters: PEFT's folders and GGUF files. No torch here."""
