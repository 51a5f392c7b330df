"""One flag of a command line or run file that is another framework's, and no alias of ours."""

from __future__ import annotations

from arguments.flags import normalise
from arguments.translate.names import (
    DEPRECATED,
    IGNORED,
    NEUTRAL_VALUES,
    NO_EFFECT,
    PRESETS,
    not_implemented,
)
from arguments.values import SWITCH_VALUES, ParsedArgs, read_switch

_OFF = ("null", None)


def is_foreign(name: str) -> bool:
    """Whether `translate_flag` knows the name, or it is known and not implemented."""
    return (
        name in PRESETS or name in NO_EFFECT or name in IGNORED or not_implemented(name) is not None
    )


def translate_flag(name: str, typed: str, value: object, parsed: ParsedArgs) -> bool:
    """Set what a flag stands for, or warn that it has no effect.

    Args:
        name: The flag, without a prefix.
        typed: As the user wrote it.
        value: True if none was given.
        parsed: Gets settings, warnings and problems.

    Returns:
        Whether the flag is dealt with; False for unknown names and for what is not implemented.
    """
    if name in IGNORED:
        if value not in (*_OFF, False):
            parsed.warnings.append(f"{typed} has no effect here: {IGNORED[name]}")
        return True
    if name in PRESETS or name in NO_EFFECT:
        if value not in _OFF:
            _apply_preset(name, typed, value, parsed)
        return True
    return str(value) in NEUTRAL_VALUES.get(name, ())


def _apply_preset(name: str, typed: str, value: object, parsed: ParsedArgs) -> None:
    presets = PRESETS.get(name, {})
    try:
        on = read_switch(value)
    except ValueError:
        parsed.add_problem(typed, value, SWITCH_VALUES, next(iter(presets), None))
        return
    if on:
        parsed.warnings += deprecation(typed, name)
    if name in NO_EFFECT and on:
        parsed.warnings.append(f"{typed} has no effect here: {NO_EFFECT[name]}")
    for dest, preset in presets.items():
        if on or isinstance(preset, bool):
            parsed.assign(dest, preset if on else not preset, typed)
        else:
            parsed.turn_off(dest, preset, typed)


def deprecation(typed: str, name: str) -> list[str]:
    """A warning if the framework that has this name calls it deprecated."""
    replacement = DEPRECATED.get(normalise(typed)) or DEPRECATED.get(name)
    return [] if replacement is None else [f"{typed} is deprecated; use {replacement}"]
