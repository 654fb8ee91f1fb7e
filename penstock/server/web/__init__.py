"""The page that browsers get: its files, and the routes that serve them."""
