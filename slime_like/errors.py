"""The error for conditions that the user of a run can fix."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot continue. Printed as one message without a traceback, as are ValueError and
    OSError."""
