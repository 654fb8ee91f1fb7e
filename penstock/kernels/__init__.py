"""The op list, the registry that chooses an implementation per op, and the implementations."""
