"""Responses over WebSockets: connections, their turns, and what these go on from."""
