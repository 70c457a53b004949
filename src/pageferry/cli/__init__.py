"""The command line: `pageferry`."""

import os

# Before gRPC is loaded: its handlers of fork would only add noise where `up` starts a process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
