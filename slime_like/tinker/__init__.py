"""The Tinker-compatible API on our own workers: see docs/en/server.md. `python -m
slime_like.tinker` is in __main__.py."""
