"""One model in stages: each runs a part of the layers, on steps that pass through one after the other."""
