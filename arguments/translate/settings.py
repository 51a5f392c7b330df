"""Settings that mean something else in another framework, or select its defaults."""

from __future__ import annotations

from arguments.translate.losses import translate_losses
from arguments.translate.slime import planned_world_size, set_loss_defaults, translate_launch
from arguments.values import ParsedArgs

__all__ = ["planned_world_size", "translate_settings"]


def translate_settings(parsed: ParsedArgs) -> None:
    """Replace other frameworks' meaning of our flags, after run file and command line are merged;
    records problems and warnings."""
    set_loss_defaults(parsed)  # of the losses, which the next line replaces
    translate_losses(parsed)
    translate_launch(parsed)
