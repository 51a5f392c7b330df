"""Refuse numbers in an answer that would take minutes or gigabytes to write down.

sympy evaluates ``9^{9^{9^9}}`` and ``99999999!`` as soon as it reads them, and mpmath reduces
``\\sin(10^{10^8})`` with as many digits of pi, in calls that no deadline inside the process can
end. The functions below do almost all of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MAX_BITS = 2**17  # of an integer power, and of the magnitude of an angle: 39,000 digits
MAX_FACTORIAL = 10_000  # 36,000 digits
_MAX_FLOAT_POWER = 2**40  # mpmath multiplies it out


class TooLarge(ValueError):
    """The answer has a number beyond these limits."""


@functools.cache
def bound() -> None:
    """Make sympy and mpmath raise `TooLarge`, in this process."""
    from mpmath.libmp import libelefun
    from sympy.core.numbers import Integer
    from sympy.functions.combinatorial.factorials import binomial, factorial

    _guard(
        Integer,
        "_eval_power",
        lambda base, power: (
            isinstance(power, Integer) and abs(base.p).bit_length() * abs(power.p) > MAX_BITS
        ),
    )
    _guard(
        libelefun,
        "mpf_pow_int",
        lambda base, power, bits, *_: abs(power) > _MAX_FLOAT_POWER or bits > MAX_BITS,
    )
    _guard(libelefun, "mod_pi2", lambda man, exp, magnitude, bits: magnitude > MAX_BITS)
    for function in (factorial, binomial):
        evaluate = _guarded(
            function.eval.__func__,
            lambda _, *numbers: any(
                isinstance(n, Integer) and abs(n.p) > MAX_FACTORIAL for n in numbers
            ),
        )
        function.eval = classmethod(evaluate)


def _guard(owner: Any, name: str, is_too_large: Callable[..., bool]) -> None:
    """Replace a function of a class or module by one that checks its arguments first."""
    setattr(owner, name, _guarded(getattr(owner, name), is_too_large))


def _guarded(function: Callable[..., Any], is_too_large: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        if is_too_large(*arguments):
            raise TooLarge(f"an argument of {function.__name__} is too large")
        return function(*arguments)

    return guarded
