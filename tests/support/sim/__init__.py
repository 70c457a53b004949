"""Router, workers and clients in one event loop with virtual time: their real code, over links that can be broken."""
