"""The step loop, the engine process, its client, and the frontend that joins text and engine."""
