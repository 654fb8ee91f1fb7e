"""The native library: ops on tensors, recordings of steps, and programs that run without torch."""
