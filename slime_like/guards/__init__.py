"""Numeric guards, active in every run: they stop the run instead of training on wrong numbers."""
