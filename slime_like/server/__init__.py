"""The name that `slime_like.tinker` had: `python -m slime_like.server` still starts it."""
