"""What moves bytes: gRPC servers and channels, page transport, the engine's thread, telemetry. Never imports torch."""
