"""The other sides of bench_against_trl.py, run with the Python of TRL's environment: TRL's
GRPOTrainer, and a plain loop over transformers' `generate` and torch.

    python benchmarks/trl_sides.py trl CASE.json        prints the seconds of each step as JSON

CASE.json: model (a folder), prompts (token lists), samples, new_tokens, steps, lr. Nothing of
slime_like is imported.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def reward(text: str) -> float:
    """Fraction of vowels; takes negligible time."""
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def trl_steps(case: dict[str, Any]) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    starts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **named: Any) -> None:
            starts.append(time.perf_counter())

        def on_train_end(self, *args: Any, **named: Any) -> None:
            starts.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    tokenizer.padding_side = "left"
    size = len(case["prompts"]) * case["samples"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=size,
            num_generations=case["samples"],
            max_completion_length=case["new_tokens"],
            max_steps=case["steps"],
            learning_rate=case["lr"],
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
            reward_funcs=lambda completions, **named: [reward(c) for c in completions],
            args=config,
            train_dataset=Dataset.from_dict(
                {"prompt": [tokenizer.decode(p) for p in case["prompts"]]}
            ),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return [end - start for start, end in itertools.pairwise(starts)]


def plain_steps(case: dict[str, Any]) -> list[float]:
    """Train with the PPO loss on GRPO advantages; with one step per rollout the ratio is 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["lr"])
    count = case["samples"]
    new = case["new_tokens"]
    prompts = torch.tensor([p for p in case["prompts"] for _ in range(count)])
    width = prompts.size(1)
    seconds = []
    for _ in range(case["steps"]):
        start = time.perf_counter()
        model.eval()
        with torch.no_grad():
            tokens = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
        rewards = torch.tensor([reward(text) for text in texts]).view(-1, count)
        spread = rewards.std(1, keepdim=True) + 1e-6
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        model.train()
        logits = model(tokens).logits[:, width - 1 : -1].float()
        chosen = tokens[:, width:].unsqueeze(2)
        log_probs = logits.log_softmax(-1).gather(2, chosen).squeeze(2)
        ends = tokens[:, width:] == tokenizer.eos_token_id
        mask = ends.cumsum(1) - ends.long() == 0
        ratio = (log_probs - log_probs.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    side = {"trl": trl_steps, "plain": plain_steps}[sys.argv[1]]
    print(json.dumps(side(json.loads(Path(sys.argv[2]).read_text()))))
