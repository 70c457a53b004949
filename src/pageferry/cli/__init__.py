"""The `pageferry` command."""
