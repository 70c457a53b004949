"""The HTTP gateway: OpenAI's interface in front of the router's frontend."""
