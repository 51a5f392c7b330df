"""Agents that talk to the run as to OpenAI's or Anthropic's API, and what of their talk is trained on,
exact to the token."""
