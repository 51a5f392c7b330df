"""The examples of the guide "Extend it", from a folder outside the package: one of each plug point,
through the whole program."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, StableLmConfig, StableLmForCausalLM

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import ROOT, Done, TrainServer
from tests.fake_sglang import FakeServer

NAMES = ("policy_loss", "advantage", "reward", "model_family", "engine", "transport")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By plug point."""
    folder = tmp_path_factory.mktemp("mine")
    return {
        name: Path(shutil.copy(ROOT / "examples" / "extend" / f"{name}.py", folder))
        for name in NAMES
    }


@pytest.fixture(scope="module")
def stablelm(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family that the package does not have."""
    folder = tmp_path_factory.mktemp("stablelm")
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    torch.manual_seed(1)
    config = StableLmConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_qkv_bias=True, max_position_embeddings=256, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    StableLmForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(
    server: TrainServer, work: Workspace, modules: dict[str, Path], out: Path, **changes: object
) -> Done:
    settings = {
        "import_modules": " ".join(str(path) for path in modules.values()),
        "policy_loss_type": "spo", "spo_eps": 0.3, "advantage_estimator": "rank",
        "custom_rm_path": None, "rm_type": "letters",
    }  # fmt: skip
    return server.train(work.flags(out, **(settings | changes)), out / "log")  # type: ignore[arg-type]


def test_loss_estimator_reward_family_and_engine(
    server: TrainServer, work: Workspace, modules: dict[str, Path], stablelm: Path, tmp_path: Path
) -> None:
    """The gate compares every token's log-prob of the engine with the trainer's: family and engine
    are right, or the run stops."""
    copy = tmp_path / "copy"
    changes = {"hf_checkpoint": stablelm, "rollout_engine": "plain", "save_hf": copy}
    train(server, work, modules, tmp_path, max_train_rollout_diff=1e-3, **changes).ok()
    rows = rows_of(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-4
        assert row["train/grad_norm"] > 1e-4
        assert 0 < row["rollout/reward_mean"] <= 2
    before = StableLmForCausalLM.from_pretrained(stablelm).state_dict()
    after = StableLmForCausalLM.from_pretrained(copy).state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.extended
def test_transport(
    server: TrainServer, work: Workspace, modules: dict[str, Path], tmp_path: Path
) -> None:
    """The server's answers are the trainer's numbers after each update, so that it has the weights."""
    with FakeServer(str(work.model)) as sglang:
        train(
            server, work, modules, tmp_path, rollout_engine="sglang", no_sglang_router="",
            rollout_external_engine_addrs=sglang.address, update_weight_transport="shm", max_train_rollout_diff=1e-3,
        ).ok()  # fmt: skip
        folders = [body["model_path"] for path, body in sglang.seen if path.endswith("from_disk")]
    assert len(folders) == 2 and all(folder.startswith("/dev/shm/") for folder in folders)
    assert not any(Path(folder).exists() for folder in folders)
    for row in rows_of(tmp_path):
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-4


def test_help_and_legal_values_have_them(
    server: TrainServer, work: Workspace, modules: dict[str, Path], tmp_path: Path
) -> None:
    flags = ["--import-modules", *modules.values(), "--help"]
    shown = {
        about: " ".join(server.run("train", [*flags, about], tmp_path / "help").ok().out.split())
        for about in ("spo", "advantage-estimator", "rm-type", "rollout-engine", "transport")
    }
    assert "--spo-eps" in shown["spo"] and "default: 0.2" in shown["spo"]
    assert "rank: the rank of the reward in its group." in shown["advantage-estimator"]
    assert "letters: the share of letters." in shown["rm-type"]
    assert "plain: transformers, one request at a time." in shown["rollout-engine"]
    assert "shm: a folder in this host's memory." in shown["transport"]

    wrong = {
        "policy_loss_type": "spx", "advantage_estimator": "rnk", "rm_type": "lettres", "rollout_engine": "plane",
        "update_weight_transport": "smh", "spo_eps": "-1", "output_dir": None,
    }  # fmt: skip
    done = train(server, work, modules, tmp_path, **wrong)
    assert done.status == 2
    for legal in ("sapo, spo", "rank", "letters", "local, plain, sglang", "shm", "> 0"):
        assert legal in done.err
