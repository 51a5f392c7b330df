"""A tiny model, its tokenizer, prompts and a reward that a random model can earn, and helpers that
read the output of a finished run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime_like.cli.tiny_model import make_model, make_tokenizer
from slime_like.metrics.logger import read_metrics
from slime_like.rollout.recording import load_rollout

WORDS = [a + b + c for a in "bcd" for b in "aeiou" for c in ("ng", "st", "rk")]
# the share of letters in the response, plus a little for every token: it differs between samples
REWARD = """
import re
def letters(args, sample):
    response = re.sub(r"<[|][a-z]*[|]>", "", sample.response)  # special tokens are no letters
    return sum(c.isalpha() for c in response) / 8 + 0.01 * sample.response_length
"""
SAME_RUN = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/entropy",
    "rollout/reward_mean",
    "rollout/response_length_mean",
)


@dataclass(frozen=True)
class Workspace:
    """Files that runs share."""

    model: Path
    expert_model: Path
    prompts: Path
    reward: Path

    def flags(self, out: Path, **changes: str | int | float | Path | None) -> list[str]:
        """A right command line of a small RL run. changes: values by flag, with underscores; ""
        makes a switch, None leaves it out."""
        values: dict[str, Any] = {
            "hf_checkpoint": self.model, "prompt_data": self.prompts, "label_key": "answer", "apply_chat_template": "",
            "input_key": "messages", "custom_rm_path": f"{self.reward}:letters", "rm_num_workers": 1, "rollout_shuffle": "",
            "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "num_steps_per_rollout": 2, "micro_batch_size": 4,
            "rollout_max_response_len": 8, "lr": 1e-3, "policy_loss_type": "sapo", "no_tensorboard": "", "no_progress": "", "no_plot": "",
            "output_dir": out,
        }  # fmt: skip
        words: list[str] = []
        for name, value in (values | changes).items():
            if value is not None:
                words += [
                    "--" + name.replace("_", "-"),
                    *([] if value == "" else str(value).split()),
                ]
        return words


def make_workspace(folder: Path) -> Workspace:
    folder.mkdir(parents=True, exist_ok=True)
    work = Workspace(
        folder / "model", folder / "expert_model", folder / "prompts.jsonl", folder / "reward.py"
    )
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden_size=32, num_layers=2, seed=1)
    # transformers makes this row zero, where the gradient of a root mean square is a thousand times
    # larger
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.pad_token_id].normal_(std=0.05)
    model.save_pretrained(work.model)
    tokenizer.save_pretrained(work.model)
    make_expert_model(work)
    rows = [
        {"messages": [{"role": "user", "content": f"spell {word} backward"}], "answer": word[::-1]}
        for word in WORDS
    ]
    work.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work.reward.write_text(REWARD)
    return work


def save_other_model(
    folder: Path, *, seed: int, std: float, hidden_size: int = 32, num_layers: int = 2
) -> Path:
    """A model with the workspace's tokens and other weights; std, of its embedding: how far from
    equal its logits are."""
    model = make_model(make_tokenizer(), hidden_size=hidden_size, num_layers=num_layers, seed=seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=std)
    model.save_pretrained(folder)
    return folder


def make_expert_model(work: Workspace) -> None:
    """Two layers of four experts each, of which a token takes two."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, max_position_embeddings=256,
        pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(work.expert_model)
    tokenizer.save_pretrained(work.expert_model)


def rows_of(out: Path) -> list[dict[str, float]]:
    return read_metrics(out / "metrics.jsonl")


def same_numbers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What two runs of the same training must share, bit by bit."""
    return [{name: row[name] for name in ("step", *SAME_RUN)} for row in rows]


def sampled(template: Path, rollout_id: int) -> dict[int, tuple[list[int], float | None]]:
    """(tokens, reward) of every sample of a saved rollout, by sample id."""
    groups = load_rollout(str(template), rollout_id)
    return {s.sample_id: (s.tokens.tolist(), s.reward) for group in groups for s in group.samples}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
