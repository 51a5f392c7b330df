"""Runs that learn from pairs of answers, as a user starts them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.helpers import WORDS, Workspace, rows_of
from tests.e2e.programs import TrainServer

PAIRS: dict[str, Any] = {
    "policy_loss_type": None, "n_samples_per_prompt": None, "label_key": None, "custom_rm_path": None, "rm_num_workers": None,
    "rollout_max_response_len": None, "input_key": "prompt", "num_steps_per_rollout": None, "micro_batch_size": None, "rollout_batch_size": 11,
}  # fmt: skip


HELD_OUT = WORDS[::4]


def pair_file(folder: Path) -> Path:
    """A word spelled backward is preferred to the word."""
    path = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"spell {word} backward", "chosen": word[::-1], "rejected": word}
        for word in WORDS
        if word not in HELD_OUT
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.extended
def test_dpo_prefers_the_chosen_answers(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From the loss log 2 of a policy that is its reference, on two ranks."""
    flags = {**PAIRS, "loss_type": "dpo_loss", "prompt_data": pair_file(tmp_path), "ref_load": work.model, "num_rollout": 6, "lr": 3e-3}  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log", ranks=2).ok()
    rows = rows_of(tmp_path / "out")
    assert abs(rows[0]["train/loss"] - math.log(2)) < 1e-4 and abs(rows[0]["train/kl"]) < 1e-6
    assert rows[-1]["train/pair_accuracy"] > 0.9 and rows[-1]["train/loss"] < 0.5
    assert rows[-1]["train/pair_margin"] > 0.5
    assert rows[-1]["train/chosen_reward"] > rows[-1]["train/rejected_reward"]


@pytest.mark.extended
def test_orpo_prefers_the_chosen_answers_without_a_reference(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    flags = {**PAIRS, "loss_type": "orpo_loss", "prompt_data": pair_file(tmp_path), "num_rollout": 8, "lr": 3e-3, "orpo_lambda": 1.0}  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log", ranks=2).ok()
    rows = rows_of(tmp_path / "out")
    assert rows[-1]["train/pair_accuracy"] > 0.9 > rows[0]["train/pair_accuracy"]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 1
    assert rows[-1]["train/log_odds_ratio"] > rows[0]["train/log_odds_ratio"] + 0.5
    assert rows[-1]["train/chosen_reward"] > rows[0]["train/chosen_reward"], "and learns them"


def test_kto_learns_what_is_desirable_from_single_answers(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From half the weights and the reference point 0 of a policy that is its reference; stopped and
    resumed on another number of ranks, it is the run that was not."""
    path = tmp_path / "answers.jsonl"
    words = [word for word in WORDS if word not in HELD_OUT]
    rows = [
        {
            "prompt": f"spell {word} backward",
            "completion": word[::-1] if good else word,
            "good": good,
        }
        for good in (True, False)
        for word in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {**PAIRS, "loss_type": "kto_loss", "prompt_data": path, "ref_load": work.model, "label_key": "completion", "desirable_key": "good",
             "rollout_batch_size": 16, "num_rollout": 8, "lr": 3e-3, "kto_beta": 0.3}  # fmt: skip
    out = tmp_path / "out"
    server.train(work.flags(out, **flags), tmp_path / "log").ok()
    rows = rows_of(out)
    assert abs(rows[0]["train/loss"] - 0.5) < 1e-4 and abs(rows[0]["train/reference_point"]) < 1e-4
    assert rows[-1]["train/loss"] < 0.35
    assert rows[-1]["train/chosen_reward"] - rows[-1]["train/rejected_reward"] > 1
    saved = flags | {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 4}
    parts = tmp_path / "parts"
    server.train([*work.flags(parts, **saved), "--exit-interval", "4"], tmp_path / "log1").ok()
    server.train(work.flags(parts, **saved), tmp_path / "log2", ranks=2).ok()
    for whole, part in zip(rows, rows_of(parts), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/reference_point"):
            assert part[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5), name


def scores_of(folder: Path, word: str) -> tuple[float, float]:
    """Of the word spelled backward, and of the word, by transformers' model for sequences."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    question = tokenizer(f"spell {word} backward", add_special_tokens=False)["input_ids"]
    found = []
    for answer in (word[::-1], word):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([[*question, *ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            found.append(float(model(tokens).logits))
    return found[0], found[1]


@pytest.mark.extended
def test_a_reward_model_prefers_answers_that_it_has_not_seen(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From the loss log 2 of a head of zeros; it continues after a checkpoint, transformers loads what
    is saved, and a critic starts from it."""
    flags = {**PAIRS, "loss_type": "rm_loss", "prompt_data": pair_file(tmp_path), "lr": 3e-3, "lr_decay_iters": 9,
             "save": tmp_path / "save", "load": tmp_path / "save", "save_interval": 5, "save_hf": tmp_path / "rm"}  # fmt: skip
    first = work.flags(tmp_path / "first", **flags, num_rollout=5)
    server.train(first, tmp_path / "log1", ranks=2).ok()
    rows = rows_of(tmp_path / "first")
    assert abs(rows[0]["train/loss"] - math.log(2)) < 1e-5
    second = work.flags(tmp_path / "second", **flags, num_rollout=10)
    server.train(second, tmp_path / "log2", ranks=2).ok()
    rows = rows_of(tmp_path / "second")
    assert rows[-1]["train/pair_accuracy"] > 0.9 and rows[-1]["train/loss"] < 0.3
    pairs = [scores_of(tmp_path / "rm", word) for word in HELD_OUT]
    assert sum(chosen > rejected for chosen, rejected in pairs) > 0.9 * len(pairs)
    assert load_file(tmp_path / "rm/model.safetensors")["score.bias"].item() == 0
    words = ("--load", tmp_path / "save", "--hf-checkpoint", work.model, "--output", tmp_path / "converted")  # fmt: skip
    common = ("--no-progress", "--verify", "checksums", "logits")
    done = server.run("scripts.convert_megatron_to_hf", (*words, *common), tmp_path / "log4").ok()
    assert done.out.count("\nverified: ") == 2
    one, other = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("rm", "converted"))  # fmt: skip
    assert one == other and "ForSequenceClassification" in one["architectures"][0]
    saved, found = (load_file(tmp_path / at / "model.safetensors") for at in ("rm", "converted"))
    assert saved.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in saved.items())
    critic = work.flags(tmp_path / "ppo", advantage_estimator="ppo", critic_load=tmp_path / "rm", num_rollout=1)  # fmt: skip
    server.train(critic, tmp_path / "log3", ranks=2).ok()
    assert abs(rows_of(tmp_path / "ppo")[0]["rollout/values_mean"]) > 1e-3
