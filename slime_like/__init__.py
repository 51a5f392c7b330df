"""slime_like: reinforcement-learning training backend for large language models on Megatron-core."""

__version__ = "0.1.0"
