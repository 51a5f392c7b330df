"""The conversion scripts as a user calls them: both directions, interrupted ones, damage, wrong
templates, what inspect says."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_like.checkpoints.files import hash_file
from slime_like.checkpoints.folders import TRACKER
from slime_like.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from slime_like.cli import inspect_checkpoint
from slime_like.cli.tiny_model import make_model, make_tokenizer
from tests.e2e.faults import write_payload
from tests.e2e.programs import ENVIRONMENT, ROOT, Done, TrainServer, clean_environment

TO_MEGATRON, TO_HF, INSPECT = (
    "scripts.convert_hf_to_megatron",
    "scripts.convert_megatron_to_hf",
    "scripts.inspect_checkpoint",
)
SIZES = dict(
    vocab_size=90,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[n].dtype and torch.equal(a, other[n]) for n, a in one.items()
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ "moe", tied in float32; "llama", untied in bfloat16."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    experts = dict(
        head_dim=16,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, **experts)
    ).save_pretrained(folder / "moe")
    config = transformers.LlamaConfig(**SIZES, intermediate_size=48, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def converted(server: TrainServer, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of "moe"."""
    root = tmp_path_factory.mktemp("converted") / "ck"
    words = (
        "--hf-checkpoint",
        models / "moe",
        "--save",
        root,
        "--no-progress",
        "--verify",
        "checksums",
        "logits",
    )
    done = server.run(TO_MEGATRON, words, root.parent / "log").ok()
    assert "weights only, step 0" in done.out
    assert (
        "have the same bits" in done.out
        and "verified: logits of 64 tokens in both formats differ by at most" in done.out
    )
    return root


def refused(done: Done, status: int) -> str:
    """The one error of a script."""
    assert done.status == status, (done.status, done.out, done.err)
    assert "Traceback" not in done.err and done.err.count("error: ") == 1, done.err
    return done.err


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_two_processes_and_another_dtype(
    server: TrainServer, models: Path, tmp_path: Path, network: str
) -> None:
    """bfloat16 -> a checkpoint in float32, cut in two -> bfloat16: no bit is lost, and every step
    agrees with its source. A critic's head starts at zero, and stays."""
    root, out = tmp_path / "ck", tmp_path / "hf"
    common = ("--no-progress", "--network", network, "--verify", "checksums", "logits")
    words = (
        "--hf-checkpoint",
        models / "llama",
        "--save",
        root,
        "--dtype",
        "fp32",
        "--tensor-model-parallel-size",
        2,
    )
    done = server.run(TO_MEGATRON, (*words, *common), tmp_path / "log1", ranks=2).ok()
    assert "TP2" in done.out and done.out.count("verified: ") == 2
    words = (
        "--load",
        root,
        "--hf-checkpoint",
        models / "llama",
        "--output",
        out,
        "--dtype",
        "bf16",
        "--max-shard-size",
        "20KB",
    )
    done = server.run(TO_HF, (*words, *common), tmp_path / "log2", ranks=2).ok()
    assert done.out.count("verified: ") == 2 + 1, "both kinds, and the checkpoint's manifest"
    before, after = stored(models / "llama"), stored(out)
    if network == "critic":
        del before["lm_head.weight"]
        before |= {
            "score.weight": torch.zeros(1, 32, dtype=torch.bfloat16),
            "score.bias": torch.zeros(1, dtype=torch.bfloat16),
        }
    assert same_bits(before, after)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_script_starts_under_torchrun(models: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "scripts/convert_hf_to_megatron.py",
    ]
    command += [
        "--hf-checkpoint",
        models / "llama",
        "--save",
        tmp_path / "ck",
        "--pipeline-model-parallel-size",
        "2",
        "--no-progress",
    ]
    environment = {**clean_environment(), **ENVIRONMENT}
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (one,) = inspect_checkpoint.look(tmp_path / "ck", verify=True)["checkpoints"]
    assert (one["health"], one["world_size"], one["networks"]["policy"]["dtypes"]) == (
        "verified",
        2,
        ["bfloat16"],
    )


def test_interrupted_conversion_continues(
    server: TrainServer, models: Path, converted: Path, tmp_path: Path
) -> None:
    """One whole file is kept, one with a flipped byte and a partial one are written again; there is
    no output folder until all is whole."""
    out = tmp_path / "hf"
    words = (
        "--load",
        converted,
        "--hf-checkpoint",
        models / "moe",
        "--output",
        out,
        "--max-shard-size",
        "25KB",
        "--workers",
        1,
        "--no-progress",
    )
    killed = server.run(TO_HF, words, tmp_path / "log1", hook="tests.e2e.faults:kill_in_shard 3")
    assert killed.status == 9
    partial = tmp_path / ".hf.partial"
    assert not out.exists() and not (partial / "config.json").exists()
    first, second = sorted(partial.glob("model-*.safetensors"))
    stamp = first.stat().st_mtime_ns
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    done = server.run(TO_HF, (*words, "--verify", "checksums"), tmp_path / "log2").ok()
    assert "1 of them kept" in done.out and "have the same bits" in done.out
    assert (out / first.name).stat().st_mtime_ns == stamp and not partial.exists()
    assert same_bits(stored(models / "moe"), stored(out))


def test_wrong_templates_and_flags_are_named(
    server: TrainServer, models: Path, converted: Path, tmp_path: Path
) -> None:
    model, llama, out, new = models / "moe", models / "llama", tmp_path / "hf", tmp_path / "x"
    given = ("--load", converted, "--hf-checkpoint", model, "--output", out)
    to_hf: dict[str, tuple[Any, ...]] = {
        "num_moe_experts 4 (template: None)": (
            "--load",
            converted,
            "--hf-checkpoint",
            llama,
            "--output",
            out,
        ),
        "--ckpt-step 7": (*given, "--ckpt-step", 7),
        "--max-shard-size 5parsec": (*given, "--max-shard-size", "5parsec"),
        "--network critic": (*given, "--network", "critic"),
        f"--quantized: --hf-checkpoint {model} is not quantised; give": (*given, "--quantized"),
    }
    to_megatron: dict[str, tuple[Any, ...]] = {
        "has checkpoints already (steps 0)": ("--hf-checkpoint", model, "--save", converted),
        "= 2 does not divide the 1 processes": ("--hf-checkpoint", model, "--save", new, "--tensor-model-parallel-size", 2),
        "--tensor-model-parallel-size (given: 0): must be >= 1": ("--hf-checkpoint", model, "--save", new, "--tensor-model-parallel-size", 0),
        "--expert-model-parallel-size (given: 3): must be a divisor of 4": (
            "--hf-checkpoint", model, "--save", new, "--expert-model-parallel-size", 3,
        ),
        "--workers 0": ("--hf-checkpoint", model, "--save", new, "--workers", 0),
    }  # fmt: skip
    for number, (program, words, argv) in enumerate(
        [(TO_HF, words, argv) for words, argv in to_hf.items()]
        + [(TO_MEGATRON, words, argv) for words, argv in to_megatron.items()]
    ):
        assert words in refused(server.run(program, argv, tmp_path / f"log{number}"), 2)
    assert not out.exists() and not new.exists()


def test_a_conversion_that_is_wrong_is_reported(
    server: TrainServer, models: Path, converted: Path, tmp_path: Path
) -> None:
    """Both judges find two exchanged tensors."""
    common = ("--load", converted, "--hf-checkpoint", models / "moe", "--no-progress")
    for kind, words in (
        ("checksums", "differ in decoder.layers.1"),
        ("logits", "with a standard deviation of"),
    ):
        argv = (*common, "--output", tmp_path / kind, "--verify", kind)
        done = server.run(
            TO_HF, argv, tmp_path / f"log-{kind}", hook="tests.e2e.faults:exchange_gate_and_up 1"
        )
        assert f"--verify {kind}: " in refused(done, 1) and words in done.err


def test_inspect_reports_health(
    server: TrainServer, models: Path, converted: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    shutil.copytree(converted, root)
    found = json.loads(server.run(INSPECT, (root, "--json"), tmp_path / "log1").ok().out)
    (one,) = found["checkpoints"]
    assert (one["step"], one["health"], one["world_size"], one["weights_only"]) == (
        0,
        "verified",
        1,
        True,
    )
    assert one["networks"]["policy"]["parameters"] > 10_000 and one["networks"]["policy"][
        "dtypes"
    ] == ["float32"]
    shard = next((root / "iter_0000000" / "policy").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    (root / "iter_0000004.tmp").mkdir()
    damaged = server.run(INSPECT, (root,), tmp_path / "log2")
    assert damaged.status == 1 and shard.name in damaged.out and "iter_0000004.tmp" in damaged.out
    words = ("--load", root, "--hf-checkpoint", models / "moe", "--output", tmp_path / "hf")
    error = refused(server.run(TO_HF, words, tmp_path / "log3"), 1)
    assert "is damaged" in error and shard.name in error
    assert "holds no checkpoints" in refused(
        server.run(INSPECT, (tmp_path / "log1",), tmp_path / "log4"), 2
    )


def test_inspect_runs_nothing(converted: Path, tmp_path: Path) -> None:
    root, mark = tmp_path / "ck", tmp_path / "ran"
    shutil.copytree(converted, root)
    payload = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()
    (root / "iter_0000000" / "policy" / ".metadata").write_bytes(payload)
    found = inspect_checkpoint.look(root, verify=False)
    assert "os.mkdir" in " ".join(found["checkpoints"][0]["problems"])
    assert not mark.exists()
    pickle.loads(payload)
    assert mark.is_dir(), "the payload is one"


def test_a_payload_in_any_file_runs_nothing(
    server: TrainServer, models: Path, converted: Path, tmp_path: Path
) -> None:
    """Of a checkpoint, with a manifest that agrees, and of a Hugging Face folder. What a conversion
    does not read it does not refuse."""
    mark, out = tmp_path / "ran", tmp_path / "hf"
    files = sorted(path.relative_to(converted) for path in converted.rglob("*") if path.is_file())
    for number, name in enumerate(files):
        root = tmp_path / f"ck-{number}"
        shutil.copytree(converted, root)
        folder = root / "iter_0000000"
        records = read_manifest(folder)
        write_payload(root / name, mark)
        if name.parts[0] == folder.name and name.name != MANIFEST:
            write_manifest(folder, {**records, str(Path(*name.parts[1:])): hash_file(root / name)})
        words = (
            "--load",
            root,
            "--hf-checkpoint",
            models / "moe",
            "--output",
            out,
            "--no-progress",
        )
        done = server.run(TO_HF, words, tmp_path / f"log-{number}")
        inspect_checkpoint.look(root, verify=True)
        if name.name in ("common.pt", "metadata.json", TRACKER):
            shutil.rmtree(out)  # converted
        else:
            refused(done, 1)
        assert not mark.exists(), name
    for number, name in enumerate(("config.json", "model.safetensors", "pytorch_model.bin")):
        folder = tmp_path / f"model-{number}"
        shutil.copytree(models / "llama", folder)
        if name == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        write_payload(folder / name, mark)
        done = server.run(
            TO_MEGATRON,
            ("--hf-checkpoint", folder, "--save", tmp_path / "new", "--no-progress"),
            tmp_path / f"log-hf-{number}",
        )
        assert done.status in (1, 2) and "Traceback" not in done.err, done.err
        assert str(folder) in done.err and not mark.exists(), (name, done.err)
    torch.load(folder / name, weights_only=False)
    assert mark.exists(), "the payload is one"


def test_a_critic_s_head_survives_both_directions(server: TrainServer, tmp_path: Path) -> None:
    import transformers

    tokenizer = make_tokenizer()
    base = tmp_path / "base"
    make_model(tokenizer, hidden_size=32, num_layers=2, seed=1).save_pretrained(base)
    critic = transformers.AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(tmp_path / "critic")
    common = ("--network", "critic", "--no-progress", "--verify", "logits", "checksums")
    words = ("--hf-checkpoint", tmp_path / "critic", "--save", tmp_path / "ck")
    assert "--critic-load" in server.run(TO_MEGATRON, (*words, *common), tmp_path / "log1").ok().out
    words = ("--load", tmp_path / "ck", "--hf-checkpoint", base, "--output", tmp_path / "hf")
    server.run(TO_HF, (*words, *common), tmp_path / "log2").ok()
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    assert again.config.num_labels == 1
    assert same_bits(dict(critic.state_dict()), dict(again.state_dict()))
