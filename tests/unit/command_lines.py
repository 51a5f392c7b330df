"""Command lines for tests: a complete one, and variants of it. The files that it names are written
to a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.config import ConfigError, Problem, Range

HF_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# a model that sees images
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
TOWER = {"spatial_merge_size": 3, "deepstack_visual_indexes": [0, 1, 2]}
SEEING: Mapping[str, Any] = {
    **HF_CONFIG,
    **{"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
    **{"rope_theta": None, "rope_parameters": ROPE, "image_token_id": 300},
    **{"head_dim": 16, "vision_config": TOWER},
}


def write_files(folder: Path, **changes: Any) -> dict[str, str]:
    """A checkpoint's config.json and a prompt file. changes: keys of config.json."""
    checkpoint = folder / "hf"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    return {"hf": str(checkpoint), "prompts": str(prompts)}


def complete(folder: Path, *more: str, without: tuple[str, ...] = ()) -> list[str]:
    """A command line that is right, less the flags in `without`, followed by `more`. Supervised
    fine-tuning has neither groups nor rewards."""
    files = write_files(folder)
    if "sft_loss" in more:
        without = (*without, "--n-samples-per-prompt", "--rm-type")
    flags = {
        "--hf-checkpoint": files["hf"],
        "--prompt-data": files["prompts"],
        "--label-key": "label",
        "--rm-type": "exact_match",
        "--lr": "1e-5",
        "--num-rollout": "2",
        "--rollout-batch-size": "4",
        "--n-samples-per-prompt": "4",
    }
    return [
        word for flag, value in flags.items() if flag not in without for word in (flag, value)
    ] + list(more)


# an old policy that differs from the new one: without, some losses warn
TWO_STEPS = "--num-steps-per-rollout 2 "


def parse_flags(folder: Path, flags: str) -> RunConfig:
    """The complete command line followed by `flags`, where {folder} is the folder."""
    return parse_args(complete(folder, *flags.replace("{folder}", str(folder)).split()), 1)


def problems_of_flags(folder: Path, flags: str) -> tuple[Problem, ...]:
    return problems_of(complete(folder, *flags.replace("{folder}", str(folder)).split()))


def problems_of(argv: list[str], world_size: int = 1) -> tuple[Problem, ...]:
    """What is wrong with a command line."""
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, world_size)
    return caught.value.problems


def refused(rows: Sequence[tuple[str, str, str, str]]) -> pytest.MarkDecorator:
    """Parametrise by `row`: the name of the rule, or "" for what is declared with a setting; flags;
    the flag that is named; words of the message."""
    ids = [f"{row[0] or row[2].lstrip('-')}-{i}" for i, row in enumerate(rows)]
    return pytest.mark.parametrize("row", rows, ids=ids)


def assert_refused(found: Sequence[Problem], row: tuple[str, str, str, str]) -> None:
    """One mistake is reported once, by its flag."""
    _, flags, flag, message = row
    assert [p.flag for p in found] == [flag], (flags, *map(str, found))
    assert message in str(found[0])


def illegal_value(
    choices: Sequence[object] | None, legal: Range | None, *, is_integer: bool, is_text: bool
) -> Any:
    """A value of a setting's type outside its choices or its range."""
    if choices:
        return "no-such-value" if is_text else 987
    assert legal is not None
    numbers = (0, -1, 2) if is_integer else (0.0, -1.0, 1.0, 2.0)
    return next(number for number in numbers if not legal.holds(number))


def interpreter_with(folder: Path, files: Mapping[str, str]) -> str:
    """A Python that has these modules, as an installation that flags are checked against.

    Args:
        files: Sources by path below site-packages.
    """
    for file, source in files.items():
        path = folder / "site" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)
