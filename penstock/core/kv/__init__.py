"""KV caches by ids alone: pools of blocks, the prefix tree, one manager a kind of cache group."""
