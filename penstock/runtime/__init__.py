"""Turns plans into tensors and back: memory plan, KV memory, batch builder, model runner, sampler."""
