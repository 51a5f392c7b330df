"""The adaptive entropy bonus, against the recursion of the paper."""

from __future__ import annotations

import json
import math

import pytest

from slime_like.losses.entropy_control import EntropyController

ENTROPIES = [0.5, 0.3, 0.2, 0.1, 0.05, 0.15, 0.19, 0.25, 0.6, 0.1]


def controller(start: float = 0.002) -> EntropyController:
    return EntropyController(start, target=0.2, delta=1e-3, low=0.0, high=0.005)


def test_the_recursion_by_loop() -> None:
    adaptive, c = controller(), 0.002
    assert adaptive.coef == 0.002
    for entropy in ENTROPIES:
        c = min(max(c + (1e-3 if entropy < 0.2 else -1e-3 if entropy > 0.2 else 0), 0.0), 0.005)
        adaptive.update(entropy)
        assert adaptive.value == pytest.approx(c)
        assert adaptive.coef == (adaptive.value if entropy <= 0.2 else 0.0)
    assert {adaptive.coef for _ in range(1)} == {adaptive.value}


def test_it_keeps_an_entropy_that_falls_by_itself() -> None:
    """A toy whose entropy falls by 0.01 a step and rises with the bonus: without it 0, with it
    around the target."""

    def end(bonus: EntropyController) -> float:
        entropy = 0.6
        for _ in range(300):
            entropy = max(entropy - 0.01 + 5 * bonus.coef, 0.0)
            bonus.update(entropy)
        return entropy

    assert end(EntropyController(0.0)) == 0
    assert end(controller(0.0)) == pytest.approx(0.2, abs=0.03)


def test_a_resumed_controller_continues_exactly() -> None:
    full, first = controller(), controller()
    for entropy in ENTROPIES:
        full.update(entropy)
    for entropy in ENTROPIES[:4]:
        first.update(entropy)
    resumed = controller()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed == first
    for entropy in ENTROPIES[4:]:
        resumed.update(entropy)
    assert resumed == full


def test_fixed_is_fixed_and_what_is_not_finite_changes_nothing() -> None:
    fixed = EntropyController(0.01)
    fixed.update(0.0)
    fixed.load_state_dict({"value": 0.5, "active": False})
    assert fixed.coef == 0.01
    adaptive = controller()
    for entropy in (math.nan, math.inf, None):
        adaptive.update(entropy)
    adaptive.load_state_dict({})
    assert adaptive == controller()
