"""The client library: `Client` (async) and `SyncClient`."""
