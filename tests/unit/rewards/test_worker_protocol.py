"""What a reward function may return."""

from __future__ import annotations

import pytest

from slime_like.rewards.worker_protocol import to_answer


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (1, {"value": 1.0}),
        (True, {"value": 1.0}),
        (None, {"value": None}),
        ({"score": 0.5, "format": 1, "note": "x"}, {"value": 0.5, "details": {"format": 1.0}}),
        ({"other": 1}, {"wrong_type": "a dict with the keys 'other'"}),
        ("0.5", {"wrong_type": "str"}),
        ([1.0, "x"], {"wrong_type": "list"}),
        (1j, {"wrong_type": "complex"}),
    ],
)
def test_values_as_answers(value, answer):
    assert to_answer(value, "score") == answer


def test_array_values_as_answers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for scalar in (numpy.float32(0.5), numpy.array([0.5]), torch.tensor(0.5)):
        assert to_answer(scalar, None) == {"value": 0.5}
    assert to_answer(numpy.bool_(True), None) == {"value": 1.0}
    for many in (numpy.zeros((3, 1)), torch.zeros(1, 3)):
        assert "of more than one dimension" in to_answer(many, None)["wrong_type"]
