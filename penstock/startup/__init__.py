"""From a model to an engine: what it needs, the memory plan, measured peaks, loading, warm-up."""
