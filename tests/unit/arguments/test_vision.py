"""Runs with images: which models they need, and which settings go with them."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arguments.hf.vision import read_vision, seeing_models
from arguments.parse import parse_args
from slime_like.config import ConfigError, Problem
from slime_like.images.rows import PlaceholderRule
from slime_like.images.settings import VisionFamily
from slime_like.weights.families import model_families, register_model_family
from slime_like.weights.families.base import ModelFamily
from tests.unit.command_lines import HF_CONFIG, ROPE, SEEING, TOWER, complete, problems_of

IMAGES = ("--multimodal-keys", '{"image": "images"}', "--apply-chat-template")


def words_of(folder: Path, *flags: str, **changes: Any) -> list[str]:
    """A command line of a run with images. changes: keys of config.json."""
    argv = complete(folder, *IMAGES, *flags)
    (folder / "hf" / "config.json").write_text(json.dumps({**SEEING, **changes}))
    return argv


def test_the_tower_of_a_run_with_images(tmp_path: Path) -> None:
    config = parse_args(words_of(tmp_path), 1)
    vision = config.gpt.vision
    assert vision is not None
    assert (vision.rule.image_token, vision.rule.merge_size) == (300, 3)
    assert (vision.sections, vision.deepstack_layers, vision.trained) == ((4, 2, 2), 3, False)
    assert config.megatron.transformer.apply_rope_fusion is False
    trained = parse_args(
        words_of(tmp_path, "--train-vision-tower", "--vision-tower-lr", "1e-6"), 1
    ).gpt.vision
    assert trained is not None
    assert trained.trained and trained.learning_rate == 1e-6
    assert parse_args(complete(tmp_path), 1).gpt.vision is None, "a run of text has no tower"


CASES: list[tuple[str, str, int, dict[str, Any], str, str]] = [
    ("check_deepstack_layers", "--pipeline-model-parallel-size 2", 2, {}, "--multimodal-keys",
     "the outputs of the first 3 layers of this model, and the first pipeline stage has 2; use"),
    ("check_deepstack_layers", "--pipeline-model-parallel-size 2 "
     "--num-virtual-stages-per-pipeline-rank 2", 2, {}, "--multimodal-keys",
     "the first virtual pipeline stage has 1"),
    ("check_rope_kernel", "--apply-rope-fusion", 1, {}, "--apply-rope-fusion", "on three axes"),
    ("read_vision", "", 1, {"image_token_id": 320}, "--multimodal-keys",
     "image_token_id must be a token of the vocabulary of 320, not 320"),
    ("read_vision", "", 1, {"image_token_id": None}, "--multimodal-keys", "not None"),
    ("read_vision", "", 1, {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2]}},
     "--multimodal-keys", "mrope_section [2, 2, 2] has 6 angles of a head's 8"),
    ("read_vision", "", 1, {"rope_parameters": {**ROPE, "mrope_section": [8]}},
     "--multimodal-keys", "must be 3 integers"),
    ("read_vision", "", 1, {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2}},
     "--multimodal-keys", "of scaled rotary positions of images only YaRN is supported"),
    ("read_vision", "", 1, {"vision_config": {**TOWER, "spatial_merge_size": 0}},
     "--multimodal-keys", "spatial_merge_size 0 is no size"),
    ("read_vision", "", 1, {"vision_config": {"deepstack_visual_indexes": [0] * 5}},
     "--multimodal-keys", "must be a list of at most 4 layers"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "flags", "ranks", "changes", "flag", "words"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_a_broken_rule(
    tmp_path: Path,
    rule: str,
    flags: str,
    ranks: int,
    changes: dict[str, Any],
    flag: str,
    words: str,
) -> None:
    assert named(words_of(tmp_path, *flags.split(), **changes), ranks, flag, words)


GEMMA: dict[str, Any] = {
    **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
    **{"image_token_index": 300, "mm_tokens_per_image": 9, "vision_config": {}},
    "text_config": {
        **HF_CONFIG,
        **{"model_type": "gemma3_text", "head_dim": 16, "hidden_act": None, "sliding_window": 8},
    },
}


def test_a_tower_of_whole_images(tmp_path: Path) -> None:
    argv = complete(tmp_path, *IMAGES)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(GEMMA))
    vision = parse_args(argv, 1).gpt.vision
    assert vision is not None
    assert vision.rule == PlaceholderRule(300, features=9, both_directions=True)
    words = "need attention in both directions; add --transformer-impl local"
    engine = ["--transformer-impl", "transformer_engine"]
    case = ("check_image_attention", engine, "--multimodal-keys", words)
    assert named([*argv, *case[1]], 1, case[2], case[3])
    served = ["--rollout-engine", "sglang", "--rollout-num-gpus", "1"]
    words = "both directions, which servers are not asked for; use --rollout-engine local"
    case = ("check_served_images", served, "--multimodal-keys", words)
    assert named([*argv, *case[1]], 1, case[2], case[3])


def named(argv: list[str], ranks: int, flag: str, words: str) -> list[Problem]:
    return [p for p in problems_of(argv, ranks) if p.flag == flag and words in str(p)]


def test_the_first_stage_may_have_more_layers(tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
    assert parse_args(words_of(tmp_path, *flags.split()), 2).gpt.vision is not None


SHELLS = [f for f in map(model_families.get, model_families.names()) if f.text_config]


@pytest.mark.parametrize("family", SHELLS, ids=[family.architecture for family in SHELLS])
def test_every_family_with_a_tower_says_what_its_images_need(family: ModelFamily) -> None:
    assert family.vision is not None


def test_a_model_that_takes_no_images_here_is_refused_by_name(tmp_path: Path) -> None:
    argv = complete(tmp_path, *IMAGES)
    remedy = "; use a model whose images are offered ("
    message = f"Qwen2ForCausalLM has no vision tower{remedy}"
    assert named(argv, 1, "--multimodal-keys", message)
    path = tmp_path / "hf" / "config.json"
    text = {**HF_CONFIG, "model_type": "mistral", "head_dim": 16}
    config = {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        **{"text_config": text, "vision_config": {}},
    }
    path.write_text(json.dumps(config))
    message = (
        "Mistral3ForConditionalGeneration needs breaks between the rows of an image's "
        f"placeholders, which are not offered{remedy}"
    )
    assert named(argv, 1, "--multimodal-keys", message)


REFUSED = [family for family in SHELLS if isinstance(family.vision, str)]


@pytest.mark.parametrize("family", REFUSED, ids=[family.architecture for family in REFUSED])
def test_every_refusal_names_the_model_what_it_lacks_and_a_remedy(
    tmp_path: Path, family: ModelFamily
) -> None:
    """Its text trains without --multimodal-keys."""
    hf = types.SimpleNamespace(architecture=family.architecture)
    with pytest.raises(ConfigError) as refused:
        read_vision(str(tmp_path), hf)  # type: ignore[arg-type]
    message = str(refused.value)
    assert f"{family.architecture} {family.vision}; use a model" in message
    assert "Qwen3-VL" in message and message.endswith(
        "or remove --multimodal-keys to train on text"
    )


def test_a_family_without_a_published_name_is_called_by_its_architecture() -> None:
    """A user's own, that sees images."""
    family = next(f for f in SHELLS if isinstance(f.vision, VisionFamily))
    own = replace(family, architecture="OwnForConditionalGeneration", published=())
    register_model_family(own)
    try:
        assert "OwnForConditionalGeneration" in seeing_models()
    finally:
        model_families.remove(own.architecture)
