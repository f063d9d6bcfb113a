"""One module a command; each imports what it needs and nothing more."""
