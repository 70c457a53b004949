"""Measures a server from outside: load, what came of it, and pages that show it; the command is `pageferry bench`."""
