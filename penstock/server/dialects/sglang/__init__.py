"""The native API of SGLang."""
