"""Training of agents that use an OpenAI- or Anthropic-compatible API: the gateway that serves them,
and the exact tokens of their conversations as training samples."""
