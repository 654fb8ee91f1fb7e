"""Command lines of other engines: what their flags are here."""
