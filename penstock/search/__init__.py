"""Over an engine: likely answers (beam search, best of n), and pairs of texts that are scored."""
