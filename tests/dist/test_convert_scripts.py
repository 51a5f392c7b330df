"""The conversion scripts: bit-equal round trips over layouts, interrupted conversions, damage, wrong templates, what inspect says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import inspect_checkpoint
from scripts.make_demo import make_model, make_tokenizer
from scripts.parity.ranks import REPOSITORY, run_ranks
from tests.dist.convert_worker import stored_weights
from tests.dist.test_convert import MODELS, SIZES
from tests.dist.test_convert_moe import make_models

# tensor, pipeline, virtual, expert, expert-tensor
WRITTEN_AND_LOADED = [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (1, 1))]


def run_script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, f"scripts/{name}.py", *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import transformers

    root = tmp_path_factory.mktemp("models")
    made = make_models(root, ["qwen3-moe", "mixtral"])
    for name in ("llama-llama3-untied", "qwen2-tied", "qwen3-tied"):
        family, settings = MODELS[name]
        torch.manual_seed(len(made))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(root / name)
        made[name] = str(root / name)
    return made


@pytest.mark.slow
def test_round_trips_from_one_layout_to_another(folders: dict[str, str], tmp_path: Path) -> None:
    cases: list[Any] = []
    for name in ("llama-llama3-untied", "qwen2-tied", "qwen3-tied"):
        cases += [(folders[name], *layouts) for layouts in WRITTEN_AND_LOADED[: 3 if name == "qwen2-tied" else 2]]
    expert = [((1, 1, 1, 2, 1), (1, 2, 1, 1, 1)), ((1, 2, 1, 1, 1), (1, 1, 1, 2, 1))]
    cases += [(folders[name], *layouts) for name in ("qwen3-moe", "mixtral") for layouts in expert]
    results = run_ranks("tests.dist.convert_scripts_worker:round_trips", 2, tmp_path / "run", {"cases": cases, "out": str(tmp_path)}, 200)
    assert all(len(result) == len(cases) for result in results)


@pytest.fixture(scope="module")
def converted(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint made by the script, and its model."""
    root = tmp_path_factory.mktemp("converted") / "ck"
    done = run_script("convert_hf_to_megatron", "--hf-checkpoint", folders["qwen3-moe"], "--save", root, "--no-progress")
    assert done.returncode == 0, done.stderr
    assert "weights only, step 0" in done.stdout
    return root, folders["qwen3-moe"]


def test_interrupted_conversion_goes_on(converted: tuple[Path, str], tmp_path: Path) -> None:
    """One whole file is kept, one with a flipped byte and a partial one are written again; there is no output folder until all is whole."""
    root, model = converted
    out = tmp_path / "hf"
    words = ("--load", root, "--hf-checkpoint", model, "--output", out, "--max-shard-size", "50KB", "--no-progress")
    killer = (
        "import os, sys; sys.argv = ['x', *sys.argv[1:]]\n"
        "from slime_like.convert import shards\n"
        "real, seen = shards.hashed_file, []\n"
        "def hashed_file(path):\n"
        "    seen.append(path)\n"
        "    if len(seen) == 3: open(path, 'wb').write(b'half'); os._exit(9)\n"
        "    return real(path)\n"
        "shards.hashed_file = hashed_file\n"
        "from scripts import convert_megatron_to_hf as script\n"
        "raise SystemExit(script.main())\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    killed = subprocess.run([sys.executable, "-c", killer, *map(str, words)], cwd=REPOSITORY, env=environment, timeout=120, check=False)
    assert killed.returncode == 9
    partial = tmp_path / ".hf.partial"
    assert not out.exists() and not (partial / "config.json").exists()
    first, second = sorted(partial.glob("model-*.safetensors"))
    stamp = first.stat().st_mtime_ns
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    done = run_script("convert_megatron_to_hf", *words, "--verify", "checksums")
    assert done.returncode == 0, done.stderr
    assert "1 of them kept" in done.stdout and "have the checkpoint's bits" in done.stdout
    assert (out / first.name).stat().st_mtime_ns == stamp and not partial.exists()
    stored, back = stored_weights(model), stored_weights(str(out))
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)


def test_wrong_templates_and_flags_are_named(converted: tuple[Path, str], folders: dict[str, str], tmp_path: Path) -> None:
    root, model = converted
    out = tmp_path / "hf"
    wrong = run_script("convert_megatron_to_hf", "--load", root, "--hf-checkpoint", folders["llama-llama3-untied"], "--output", out)
    assert wrong.returncode == 2 and "num_moe_experts 4 (template: None)" in wrong.stderr and "Traceback" not in wrong.stderr
    step = run_script("convert_megatron_to_hf", "--load", root, "--ckpt-step", 7, "--hf-checkpoint", model, "--output", out)
    assert step.returncode == 2 and "--ckpt-step 7" in step.stderr
    again = run_script("convert_hf_to_megatron", "--hf-checkpoint", model, "--save", root)
    assert again.returncode == 1 and "has checkpoints already" in again.stderr
    layout = run_script("convert_hf_to_megatron", "--hf-checkpoint", model, "--save", tmp_path / "x", "--tensor-model-parallel-size", 2)
    assert layout.returncode == 2 and "torchrun" in layout.stderr
    assert not out.exists() and not (tmp_path / "x").exists()


def test_inspect_tells_health(converted: tuple[Path, str], tmp_path: Path) -> None:
    root = tmp_path / "ck"
    shutil.copytree(converted[0], root)
    fine = run_script("inspect_checkpoint", root, "--json")
    found = json.loads(fine.stdout)
    assert fine.returncode == 0
    (one,) = found["checkpoints"]
    assert (one["step"], one["health"], one["world_size"], one["weights_only"]) == (0, "verified", 1, True)
    assert one["networks"]["policy"]["parameters"] > 10_000 and one["networks"]["policy"]["dtypes"] == ["float32"]
    shard = next((root / "iter_0000000" / "policy").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    (root / "iter_0000004.tmp").mkdir()
    damaged = run_script("inspect_checkpoint", root)
    assert damaged.returncode == 1 and shard.name in damaged.stdout and "iter_0000004.tmp" in damaged.stdout
    refused = run_script("convert_megatron_to_hf", "--load", root, "--hf-checkpoint", converted[1], "--output", tmp_path / "hf")
    assert refused.returncode == 1 and "is damaged" in refused.stderr and shard.name in refused.stderr


def test_inspect_runs_nothing(converted: tuple[Path, str], tmp_path: Path) -> None:
    root = tmp_path / "ck"
    shutil.copytree(converted[0], root)
    (root / "iter_0000000" / "policy" / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    found = inspect_checkpoint.look(root, verify=False)
    assert "os.system" in " ".join(found["checkpoints"][0]["problems"])
    assert not (tmp_path / "ran").exists()
    assert inspect_checkpoint.main.__module__ == "scripts.inspect_checkpoint"


def test_a_run_starts_from_a_converted_checkpoint_and_a_critic_comes_back(tmp_path: Path) -> None:
    """A critic's head survives both directions."""
    import transformers

    tokenizer = make_tokenizer()
    base = tmp_path / "base"
    make_model(tokenizer, hidden_size=32, num_layers=2, seed=1).save_pretrained(base)
    critic = transformers.AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(tmp_path / "critic")
    to = run_script("convert_hf_to_megatron", "--hf-checkpoint", tmp_path / "critic", "--save", tmp_path / "ck", "--network", "critic")
    assert to.returncode == 0, to.stderr
    back = run_script(
        "convert_megatron_to_hf", "--load", tmp_path / "ck", "--hf-checkpoint", base, "--output", tmp_path / "hf", "--network", "critic"
    )
    assert back.returncode == 0, back.stderr
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert again.config.num_labels == 1
    there = dict(again.state_dict())
    assert all(torch.equal(there[name], value) for name, value in critic.state_dict().items())
