"""How the time of every scanner, expression and parser grows with its input."""
