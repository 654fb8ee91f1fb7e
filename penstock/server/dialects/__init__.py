"""One package a client dialect; each only translates to the internal request and back."""
