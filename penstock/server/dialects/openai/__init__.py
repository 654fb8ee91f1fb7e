"""OpenAI's chat and text completions, with the extra parameters that users of vLLM send, and vLLM's tokenise routes."""
