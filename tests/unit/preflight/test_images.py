"""A run with images: its prompts are longer, and its first stage has the vision tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import megatron_patches

megatron_patches.apply()

from arguments.parse import parse_args  # noqa: E402
from arguments.run_config import RunConfig  # noqa: E402
from scripts.make_tiny_model import make_tiny_model  # noqa: E402
from slime_like.config import ConfigError  # noqa: E402
from slime_like.preflight.batches import batches_of, prompt_lengths  # noqa: E402
from slime_like.preflight.memory import report_rank  # noqa: E402
from slime_like.preflight.shape import shape_of  # noqa: E402
from tests.vision import picture  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows with a picture of 2 x 3 features, two of them, or none."""
    folder = tmp_path_factory.mktemp("seeing")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    settings = {"head_dim": 8, "num_hidden_layers": 4, "rope_parameters": rope}
    make_tiny_model("Qwen3-VL", folder / "model", images=True, **settings)
    (folder / "a.png").write_bytes(picture(1, 16, 24))
    rows = [
        {"input": "<image>" * n + "x" * (40 - 7 * n), "label": "y", "images": ["a.png"] * n}
        for n in (1, 2, 0)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, flags: str = "", ranks: int = 1) -> RunConfig:
    words = (
        f"--hf-checkpoint {folder}/model --prompt-data {folder}/rows.jsonl --label-key label "
        "--rm-type exact_match --lr 1e-5 --num-rollout 2 --rollout-batch-size 4 --preflight "
        "--n-samples-per-prompt 4 --rollout-max-response-len 8 --apply-chat-template "
        f"--micro-batch-size 4 {flags}"
    )
    return parse_args([*words.split(), "--multimodal-keys", '{"image": "images"}'], ranks)


def test_prompts_have_the_tokens_of_their_images(folder: Path) -> None:
    lengths, source = prompt_lengths(config_of(folder))
    assert lengths.tolist() == [10 + 6, 10 + 12, 10]
    assert source.endswith("4 characters a token, 6 tokens of images")


def test_a_model_without_a_processor(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (folder / "model").iterdir():
        if path.name != "preprocessor_config.json":
            (model / path.name).write_bytes(path.read_bytes())
    config = config_of(folder, f"--hf-checkpoint {model}")
    with pytest.raises(ConfigError, match="there is no image processor"):
        prompt_lengths(config)


@pytest.mark.parametrize("trained", [False, True])
def test_the_first_stage_has_the_tower(folder: Path, trained: bool) -> None:
    """Its weights, and with --train-vision-tower its gradients."""
    flags = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
    config = config_of(folder, flags + " --train-vision-tower" * trained, ranks=2)
    batches = batches_of(config)
    first, last = (report_rank(config, rank, batches) for rank in (0, 1))
    tensors = load_file(folder / "model/model.safetensors")
    tower = sum(t.numel() for name, t in tensors.items() if name.startswith("model.visual."))
    text = config.megatron.transformer.hidden_size * 128  # its vocabulary, padded
    assert first.parameters - tower == last.parameters - config.megatron.transformer.hidden_size
    assert first.state["weights"] >= 4 * (tower + text)
    assert (first.state["gradients"] - last.state["gradients"] > 3 * tower) == trained
    shape = shape_of(config.megatron.transformer, config.gpt)
    assert shape.tower == tower
    assert shape.total == sum(t.numel() for t in tensors.values())
