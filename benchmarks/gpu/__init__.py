"""What the engine and its kernels reach on a GPU, beside what the card can: `python -m benchmarks.gpu`."""
