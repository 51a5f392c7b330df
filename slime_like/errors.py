"""What stops a run for a reason that its user can see and remove."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on. Like a ValueError of a setting or a file, and an OSError, it is printed
    as one message, without a traceback."""
