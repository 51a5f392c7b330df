"""Text environments: what a model writes is an action, what it reads an observation."""
