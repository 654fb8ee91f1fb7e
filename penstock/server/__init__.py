"""The HTTP server: dialects, authentication, limits, metrics. Knows the engine's client side only; never torch."""
