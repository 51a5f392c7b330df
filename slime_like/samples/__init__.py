"""Samples across ranks: their index, episodes, and exchange."""
