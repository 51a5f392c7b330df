"""The names that programs of a user's may rely on."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slime_like

PUBLIC = """
ConfigError GenerateOutput GenerateRequest LocalEngine MegatronBackend ParallelLayout Prompt RolloutEngine RunConfig RunError
Sample SampleGroup SampleStatus SamplingParams StepResult TrainBatch TrainSample Trainer __version__ advantage_estimators
compute_advantages compute_off_policy_correction compute_policy_loss kl_estimate parse_args policy_losses process_groups
reduction_weights token_weights value_loss
"""


def test_the_names_are_these() -> None:
    """Taking one away is a change that CHANGELOG.md must name."""
    assert sorted(slime_like.__all__) == sorted(PUBLIC.split())


@pytest.mark.parametrize("name", slime_like.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    import megatron_patches

    megatron_patches.apply()
    value = getattr(slime_like, name)
    assert value is getattr(slime_like, name) and name in dir(slime_like)
    if isinstance(value, type) or callable(value):
        assert (value.__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="bogus"):
        slime_like.bogus  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, slime_like; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
