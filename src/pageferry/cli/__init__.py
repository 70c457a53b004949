"""The command line: `pageferry`."""
