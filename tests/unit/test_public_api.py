"""The names that programs of a user's may rely on."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import slime_like
from tests.paths import ROOT

PUBLIC = """
ConfigError FinishedRun GenerateOutput GenerateRequest LocalEngine MegatronBackend ParallelLayout Prompt
RolloutEngine RunConfig RunError Sample SampleGroup SampleStatus SamplingParams StepResult
TrainBatch TrainSample Trainer __version__ advantage_estimators compute_advantages
compute_off_policy_correction compute_policy_loss kl_estimate make_config parse_args policy_losses
process_groups reduction_weights token_weights train value_loss
"""

DOCS = ROOT / "docs"
# (heading, what mkdocstrings is to show below it)
SHOWN = re.findall(
    r"^### `(\w+)`\n\n::: ([\w.]+)$", (DOCS / "python_api.md").read_text("utf-8"), re.MULTILINE
)


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


def test_the_page_has_every_name_and_plug_point() -> None:
    shown = [name for name, _ in SHOWN]
    assert len(shown) == len(set(shown))
    assert set(slime_like.__all__) - {"__version__"} <= set(shown)
    guide = (DOCS / "en/extend.md").read_text("utf-8")
    assert set(re.findall(r"`@?(register_\w+)`", guide)) <= set(shown)


@pytest.mark.parametrize(("name", "path"), SHOWN, ids=[name for name, _ in SHOWN])
def test_the_page_shows_what_the_name_is(name: str, path: str) -> None:
    import megatron_patches

    megatron_patches.apply()
    module, _, last = path.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    assert last == name and (value.__doc__ or "").strip()
    assert name not in slime_like.__all__ or value is getattr(slime_like, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="bogus"):
        slime_like.bogus  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, slime_like; print([m for m in ('torch', 'megatron', 'transformers') if m in "
        "sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
