"""Stored tensors in any format, and their decoding to the canonical one."""
