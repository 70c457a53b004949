"""Assigns requests to workers, streams text, serves HTTP. Never loads torch."""
