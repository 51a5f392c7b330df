"""A server of reward models: slime-like reward-server."""
