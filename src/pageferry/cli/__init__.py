"""The command line: `pageferry`."""

import os

# Before gRPC is loaded: its handlers of fork would only add noise where `up` starts a process, and so would its notes
# about connections that end.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
