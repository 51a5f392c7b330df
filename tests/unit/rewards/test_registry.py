"""The names of rewards."""

from __future__ import annotations

from slime_like.rewards.registry import rewards


def test_registry_names():
    assert rewards.names() == [
        *("choice", "code", "dapo", "deepscaler", "exact_match", "f1", "gpqa"),
        *("gsm8k", "ifbench", "judge", "math", "remote_rm", "reward_model", "task", "zero"),
    ]
    bounded = [name for name, reward in rewards.items() if reward.bounded]
    assert bounded == ["choice", "dapo", "exact_match", "f1", "gsm8k"]
    assert [name for name, reward in rewards.items() if reward.inline] == ["zero"]
    assert [name for name, reward in rewards.items() if reward.evaluates] == ["task"]
