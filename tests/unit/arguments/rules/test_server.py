"""The server's command line: what it needs, what it refuses, and that every rule of its own is
broken somewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arguments.parse import SERVER, parse_args
from arguments.rules.declared import flags_without
from arguments.rules.server import is_loopback
from slime_like.config import ConfigError
from tests.unit.command_lines import assert_refused, refused, write_files

SGLANG = "--rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:3 --no-sglang-router"
CASES = [
    ("reject_trainer_flags", "--rm-type math", "--rm-type", "of train.py"),
    ("reject_trainer_flags", "--eps-clip 0.1", "--eps-clip", "of train.py"),
    ("reject_trainer_flags", "--save {folder}", "--save", "of train.py"),
    ("reject_trainer_flags", "--lr 1e-4", "--lr", "with every optimizer step"),
    ("reject_trainer_flags", "--clip-grad 1", "--clip-grad", "with every optimizer step"),
    ("check_gradient_overlap", "--overlap-grad-reduce", "--overlap-grad-reduce",
     "at the optimizer step"),
    ("check_server_optimizer", "--optimizer sgd", "--optimizer", "must be adam"),
    ("check_optimizer_swapping", "--use-distributed-optimizer --use-precision-aware-optimizer",
     "--use-precision-aware-optimizer", "not supported by the server"),
    ("check_server_address", "--host 0.0.0.0", "--host", "requires --api-key-file"),
    ("check_server_address", "--host somewhere.else", "--host", "requires --api-key-file"),
    ("check_key_files", "--api-key-file {folder}/none", "--api-key-file", "cannot be read"),
    ("check_key_files", "--api-key-file {folder}/empty", "--api-key-file", "has no keys"),
    ("check_key_files", "--api-key-file {folder}/bad", "--api-key-file",
     "key 2 must begin with tml-"),
    ("check_max_sequence_length", "--max-sequence-length 513", "--max-sequence-length",
     "512 positions"),
    ("check_server_sglang", f"{SGLANG} --update-weight-transport broadcast",
     "--update-weight-transport", "from --server-dir"),
    ("check_server_sglang", f"{SGLANG} --update-weight-disk-dir {{folder}}",
     "--update-weight-disk-dir", "from --server-dir"),
    ("check_server_sglang", f"{SGLANG} --max-sampler-engines 3", "--max-sampler-engines",
     "hold one snapshot"),
    ("check_server_sglang", f"{SGLANG} --rollout-local-batch-size 3", "--rollout-local-batch-size",
     "--sglang-server-concurrency"),
    ("check_unused_sglang_flags", "--rollout-external-engine-addrs 127.0.0.1:3",
     "--rollout-external-engine-addrs", "add --rollout-engine sglang"),
    ("check_server_addresses", "--rollout-engine sglang --no-sglang-router", "--rollout-engine",
     "--rollout-num-gpus"),
    ("check_started_servers", f"{SGLANG} --rollout-num-gpus-per-engine 2",
     "--rollout-num-gpus-per-engine", "add --rollout-num-gpus"),
    ("check_sglang_installation",
     "--rollout-engine sglang --rollout-num-gpus 1 --no-sglang-router --sglang-python {folder}/no",
     "--sglang-python", "cannot be run"),
    ("check_declared_rules_of_server", "--exp-avg-dtype bf16", "--exp-avg-dtype",
     "without --use-precision-aware-optimizer"),
    ("check_declared_rules_of_server", "--sequence-parallel", "--sequence-parallel",
     "without --tensor-model-parallel-size above 1"),
    ("check_server_adapters", "--lora-sync adapter --rollout-engine sglang --sglang-router-ip 127.0.0.1 "
     "--sglang-router-port 3", "--lora-sync", "that are named (--rollout-external-engine-addrs)"),
    ("check_server_adapters", f"--max-sampler-adapters 2 {SGLANG}", "--max-sampler-adapters",
     "has no effect without --lora-sync adapter"),
    ("check_server_adapters", "--max-adapter-rank 8 --lora-sync adapter", "--max-adapter-rank",
     "only valid with --rollout-engine sglang"),
    ("check_server_dir", "--server-dir {folder}/bad", "--server-dir", "is a file"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bad").write_text("tml-0123456789\nsecret\n")
    (tmp_path / "good").write_text("tml-0123456789\n")
    return tmp_path


@refused(CASES)
def test_a_broken_rule(folder: Path, row: tuple[str, str, str, str]) -> None:
    words = row[1].replace("{folder}", str(folder)).split()
    with pytest.raises(ConfigError) as caught:
        parse_args(["--hf-checkpoint", str(folder / "hf"), *words], 1, SERVER)
    assert_refused(caught.value.problems, row)


def test_a_model_is_enough(folder: Path) -> None:
    config = parse_args(["--hf-checkpoint", str(folder / "hf")], 1, SERVER)
    assert (config.server.host, config.gpt.vocab_size) == ("127.0.0.1", 320)
    assert config.warnings == ()
    open_to_all = [
        "--host",
        "0.0.0.0",
        "--api-key-file",
        str(folder / "good"),
        "--tensor-model-parallel-size",
        "2",
        "--max-tokens-per-gpu",
        "99",
    ]
    assert (
        parse_args(
            ["--hf-checkpoint", str(folder / "hf"), *open_to_all], 2, SERVER
        ).algorithm.max_tokens_per_gpu
        == 99
    )


def test_clients_bring_the_adapters_of_lora_sync(folder: Path) -> None:
    """In train.py it requires --lora-rank, which the server refuses."""
    words = ["--hf-checkpoint", str(folder / "hf"), "--lora-sync", "adapter"]
    assert parse_args(words, 1, SERVER).lora.lora_sync == "adapter"
    assert parse_args([*words, *SGLANG.split()], 1, SERVER).lora.lora_sync == "adapter"
    with pytest.raises(ConfigError, match="--lora-rank"):
        parse_args([*words, "--lora-rank", "4"], 1, SERVER)


def test_merging_by_default_where_it_rounds(folder: Path) -> None:
    def warnings(*more: str) -> tuple[str, ...]:
        return parse_args(["--hf-checkpoint", str(folder / "hf"), *more], 1, SERVER).warnings

    (said,) = warnings("--bf16")
    assert "copies of the model rounded to bf16" in said and "--lora-sync adapter serves" in said
    assert warnings() == () == warnings("--bf16", "--lora-sync", "merged")
    assert warnings("--bf16", "--lora-sync", "adapter") == ()
    path = folder / "hf" / "config.json"
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))
    assert warnings("--bf16") == (), "there is no other way"


def test_a_base_without_adapters_beside_it(folder: Path) -> None:
    """Which the sampler would load as it is, and the trainer dequantised."""
    path = folder / "hf" / "config.json"
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--hf-checkpoint", str(folder / "hf"), "--lora-sync", "adapter"], 1, SERVER)
    found = [str(p) for p in caught.value.problems if p.flag == "--lora-sync"]
    assert len(found) == 1 and "quantised" in found[0] and "--lora-sync merged" in found[0]


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host.example")))


def test_rules_with_settings_of_the_trainer_are_left_out() -> None:
    """A condition on one; and what is required with one and another is not required."""
    flags = {flag.dest: flag for flag in flags_without(frozenset({"use_opd", "lora_rank"}))}
    assert "use_opd" not in flags
    assert flags["hf_checkpoint"].required_with == ()
    assert flags["use_precision_aware_optimizer"].excludes == ()
    assert flags["use_precision_aware_optimizer"].needs != ()


def test_images_need_a_tower(folder: Path) -> None:
    """The messages name the flag that asked for them."""
    flags = ["--hf-checkpoint", str(folder / "hf"), "--serve-images"]
    with pytest.raises(ConfigError) as alone:
        parse_args(flags, 1, SERVER)
    (found,) = alone.value.problems
    assert found.flag == "--serve-images" and "or remove --serve-images" in str(found)
    with pytest.raises(ConfigError, match="or remove --serve-images"):
        parse_args([*flags, *SGLANG.split()], 1, SERVER)
