"""Every recipe of scripts/recipes: its run file is a command line without a problem, and its job
fits as its README says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import Table
from pyarrow.parquet import write_table

import megatron_patches

megatron_patches.apply()

from arguments.parse import parse_args  # noqa: E402
from slime_like.cli.tiny_model import (  # noqa: E402
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    make_tokenizer,
    save_image_processor,
)
from slime_like.preflight.check import check  # noqa: E402
from tests.paths import ROOT  # noqa: E402

FOLDER = ROOT / "scripts/recipes"
RECIPES = sorted(path.parent.name for path in FOLDER.glob("*/run.yaml"))
ROWS = ROOT / "tests/data/gsm8k/train.jsonl"
CHECKPOINTS = json.loads((ROOT / "tests/unit/arguments/slime_scripts.json").read_text())[
    "checkpoints"
]
CHECKPOINTS["Qwen3-0.6B"] = {
    **CHECKPOINTS["Qwen3-4B"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16,
}  # fmt: skip
VISION = "Qwen3-VL-4B-Instruct"
CHECKPOINTS[VISION] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2560, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17], "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip
SEEING = "geo3k_qwen3_vl_4b"
SMALLEST = "gsm8k_qwen3_0.6b"
WITHIN = 0.02  # of the memory that a README names


def settings_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name / "run.yaml").read_text())
    return found


def example_rows(name: str) -> Path:
    own = FOLDER / name / "rows.jsonl"
    return own if own.exists() else ROWS


def write_inputs(folder: Path, name: str) -> None:
    """The models and data that a run file names, as far as it is looked at before a job."""
    settings = settings_of(name)
    for key in ("hf_checkpoint", "opd_teacher_load"):
        if path := settings.get(key):
            (folder / path).mkdir(parents=True)
            config = CHECKPOINTS[Path(path).name]
            if Path(path).name == VISION:
                config = config | write_eyes(folder / path, config["vision_config"])
            (folder / path / "config.json").write_text(json.dumps(config))
    for path in (settings["prompt_data"], *settings.get("eval_prompt_data", ["x"])[1:]):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".parquet") and name == SEEING:
            lines = example_rows(name).read_text().splitlines()
            write_table(Table.from_pylist([json.loads(line) for line in lines]), folder / path)
        else:
            (folder / path).symlink_to(example_rows(name))
    for part in ("scripts", "examples"):
        (folder / part).symlink_to(ROOT / part)


def write_eyes(folder: Path, tower: dict[str, Any]) -> dict[str, int]:
    """A small tokenizer and the model's image processor, with which preflight counts the tokens of
    images; its keys of config.json."""
    tokenizer = make_tokenizer(images=True)
    tokenizer.save_pretrained(folder)
    save_image_processor(folder, tower, min_pixels=2**16, max_pixels=2**24)
    ids = tokenizer.convert_tokens_to_ids([IMAGE_START, IMAGE, IMAGE_END])
    return dict(zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"), ids))


def nodes_and_gpus(name: str) -> list[int]:
    text = (FOLDER / name / "train.sbatch").read_text()
    return [int(n) for n in re.findall(r"^#SBATCH --(?:nodes|gpus-per-node)=(\d+)$", text, re.M)]


@pytest.mark.parametrize("name", RECIPES)
def test_its_page_has_the_commands_that_get_its_model_and_data(name: str) -> None:
    """Each file that the run file names is what a command of the README leaves."""
    page = (FOLDER / name / "README.md").read_text()
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S))
    settings = settings_of(name)
    for key in ("hf_checkpoint", "opd_teacher_load"):
        if path := settings.get(key):
            assert re.search(
                rf"^hf download [\w-]+/\S+ --local-dir {re.escape(path)}( |$)", commands, re.M
            )
    for path in (settings["prompt_data"], *settings.get("eval_prompt_data", ["x"])[1:]):
        file = Path(path)
        if str(file.parent) == "data/gsm8k":
            (parts,) = re.findall(r"for part in ([\w ]+);", commands)
            assert file.stem in parts.split() and 'output "data/gsm8k/$part.jsonl"' in commands
        else:
            assert path in commands


def test_there_are_eight() -> None:
    assert len(RECIPES) == 8


@pytest.mark.parametrize(
    "name",
    [
        name if name == SMALLEST else pytest.param(name, marks=pytest.mark.extended)
        for name in RECIPES
    ],
)
def test_a_recipe_starts_and_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    nodes, gpus = nodes_and_gpus(name)
    job = ["--preflight", "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    config = parse_args(["--config", f"scripts/recipes/{name}/run.yaml", *job], 1)
    found = check(config)
    assert found.fits, found.verdict
    text = (FOLDER / name / "README.md").read_text()
    promised = re.search(r"a GPU needs ([\d.]+) GB", text)
    assert promised is not None
    assert found.heaviest.peak / 1e9 == pytest.approx(float(promised[1]), rel=WITHIN)
