"""What moves bytes: gRPC servers and channels, page transport, the engine's thread, telemetry. Never imports torch."""

import os

# Read when gRPC is first imported. Its fork handlers would only be in the way, as nothing here forks; and what it logs
# below errors, such as a peer that closed its connection, is told by our own errors.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
