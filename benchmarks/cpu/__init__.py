"""Benchmarks of the CPU path: this machine's limits, each kernel, and whole models beside other engines."""
