"""Supervised fine-tuning on whole conversations, as slime's scripts start it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

TURNS = ("spell cat", "tac", "and dog", "god")
SFT = {
    "loss_type": "sft_loss", "policy_loss_type": None, "n_samples_per_prompt": None, "label_key": None, "custom_rm_path": None,
    "rm_num_workers": None, "rollout_max_response_len": None, "apply_chat_template": None, "num_steps_per_rollout": None,
    "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout", "disable_compute_advantages_and_returns": "",
    "debug_train_only": "", "calculate_per_token_loss": "", "actor_num_nodes": 1,
}  # fmt: skip


def losses_of_turns(model: Path) -> list[float]:
    """Negative log-prob of each token of the two turns, under the mask made by hand."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    question, answer, more, last = TURNS
    parts = (f"<|user|>{question}<|assistant|>", answer, f"<|user|>{more}<|assistant|>", last)
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
    learnt = [turn % 2 == 1 for turn, part in enumerate(ids) for _ in part]
    tokens = torch.tensor([[token for part in ids for token in part]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(tokens).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return [-float(p) for p, is_learnt in zip(log_probs, learnt[1:]) if is_learnt]


def test_a_run_learns_the_turns_of_the_assistant_alone(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """On two ranks; the first loss is that of the mask made by hand, and it falls."""
    roles = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": r, "content": c} for r, c in zip(roles, TURNS)]}
    data = tmp_path / "conversations.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 4)
    more = {"prompt_data": data, "num_rollout": 3, "lr": 1e-2, "micro_batch_size": 2, "no_bf16": "",
            "actor_num_gpus_per_node": 2}  # fmt: skip
    server.train(work.flags(tmp_path, **{**SFT, **more}), tmp_path / "log", ranks=2).ok()
    losses = [row["train/loss"] for row in rows_of(tmp_path)]
    expected = losses_of_turns(work.model)
    assert len(expected) == len(TURNS[1]) + len(TURNS[3])
    assert abs(losses[0] - sum(expected) / len(expected)) < 1e-4
    assert losses[2] < losses[1] < losses[0]
