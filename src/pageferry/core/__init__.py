"""What holds without I/O: sequences, pages, hand-offs, schedulers, errors, configuration.

Standard library only, and no clock, randomness, logging or asyncio: time (seconds, monotonic), ids and draws come in
as arguments.
"""
