"""One model in several processes: what the one that leads tells the others, and what they do with it."""
