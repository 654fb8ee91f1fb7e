"""What could be decided otherwise: order and victims, gates, turns, how much may wait, what goes first, costs."""
