"""The models on this machine: by name, from wherever they come. No torch."""
