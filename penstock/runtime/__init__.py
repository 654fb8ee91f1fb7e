"""One step: plans turned into tensors and back by batch builder, KV memory, executor, model runner and sampler."""
