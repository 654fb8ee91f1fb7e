"""Layers: linear, embedding, norm, rotary, attention, experts; each declares its weights and its cache."""
