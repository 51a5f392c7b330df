"""The RL stage of scripts/demo.sh as a loop against the SDK: the same model, prompts, groups, loss,
learning rates and evaluation.

    bash scripts/demo.sh
    python -m slime_like.tinker --hf-checkpoint outputs/demo-sapo-tp2/sft/hf
    python examples/tinker/demo.py --demo outputs/demo-sapo-tp2

prints its curve on the held-out words beside train.py's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from common import connect, json_lines, settings
from tinker import types

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.demo_reward import letters_in_place

SAPO = {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "entropy_coef": 0.01}
STEPS_PER_ROLLOUT = 2
FIRST_RATE, LAST_RATE = 1e-3, 2e-4
MAX_TOKENS = 8


class Task:
    """Rows of a file with their prompts in tokens."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.rows = json_lines(file)
        self.prompts = [
            tokenizer.encode(
                tokenizer.apply_chat_template(
                    row["messages"], add_generation_prompt=True, tokenize=False
                ),
                add_special_tokens=False,
            )
            for row in self.rows
        ]

    def sample(
        self, sampler: tinker.SamplingClient, which: list[int], group: int, seed: int
    ) -> list[list[tuple[Any, float]]]:
        """Of each row a group of (sequence, reward)."""
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(self.prompts[i]),
                group,
                types.SamplingParams(max_tokens=MAX_TOKENS, seed=seed * 10_000 + i),
            )
            for i in which
        ]
        return [
            [(s, self.reward(i, s.tokens)) for s in future.result().sequences]
            for i, future in zip(which, futures, strict=True)
        ]

    def reward(self, row: int, tokens: list[int]) -> float:
        return letters_in_place(
            self.rows[row]["answer"], self.tokenizer.decode(tokens, skip_special_tokens=True)
        )

    def datums(
        self, row: int, group: list[tuple[Any, float]], samples_of_step: int
    ) -> list[types.Datum]:
        """GRPO's advantages; each sequence counts with the mean of its tokens, a step with the mean
        of its sequences."""
        prompt, rewards = self.prompts[row], np.array([reward for _, reward in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        return [
            datum(prompt, sequence, advantage, samples_of_step)
            for (sequence, _), advantage in zip(group, advantages, strict=True)
        ]


def datum(prompt: list[int], sequence: Any, advantage: float, samples_of_step: int) -> types.Datum:
    tokens, length = [*prompt, *sequence.tokens], len(sequence.tokens)

    def spread(values: Any) -> np.ndarray[Any, Any]:
        whole = np.zeros(len(tokens) - 1, dtype=np.float32)
        whole[-length:] = values
        return whole

    arrays = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "logprobs": spread(sequence.logprobs),
        "advantages": spread(advantage),
        "mask": spread(1.0),
        "weights": spread(1.0 / length / samples_of_step),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def curve_of(metrics: Path, last: int) -> dict[int, float]:
    """train.py's held-out rewards, by the number of rollouts before them."""
    rows = json_lines(metrics) if metrics.exists() else []
    return {
        row["step"]: row["eval/heldout/mean"]
        for row in rows
        if "eval/heldout/mean" in row and row["step"] <= last
    }


def main() -> None:
    options = settings(
        demo="outputs/demo-sapo-tp2",
        rollouts=160,
        stop_after=0,
        batch=32,
        group=8,
        eval_every=20,
        rank=0,
        rate_times=1.0,
    )
    folder, last = Path(options.demo), options.stop_after or options.rollouts
    client, started = connect(options), time.time()
    training = client.create_lora_training_client(
        str(folder / "sft" / "hf"), rank=options.rank
    ).result()
    tokenizer = training.get_tokenizer()
    words, heldout = (Task(folder / f"{name}.jsonl", tokenizer) for name in ("train", "heldout"))
    theirs, ours = curve_of(folder / "rl" / "metrics.jsonl", last), {}
    rng = np.random.default_rng(options.seed)
    order: list[int] = []
    for rollout in range(last + 1):
        sampler = training.save_weights_and_get_sampling_client().result()
        if rollout % options.eval_every == 0 or rollout == last:
            tries = heldout.sample(sampler, list(range(len(heldout.rows))), 4, seed=0)
            ours[rollout] = float(np.mean([reward for group in tries for _, reward in group]))
            print(
                f"{rollout:4d} rollouts: held-out {ours[rollout]:.3f}, train.py "
                f"{theirs.get(rollout, float('nan')):.3f}, {time.time() - started:.0f} s",
                flush=True,
            )
        if rollout == last:
            break
        if len(order) < options.batch:
            order = list(map(int, rng.permutation(len(words.rows))))
        which, order = order[: options.batch], order[options.batch :]
        groups = words.sample(sampler, which, options.group, seed=rollout + 1)
        size = options.batch // STEPS_PER_ROLLOUT
        for part in range(STEPS_PER_ROLLOUT):
            mine = range(part * size, (part + 1) * size)
            training.forward_backward(
                [d for i in mine for d in words.datums(which[i], groups[i], size * options.group)],
                "sapo",
                SAPO,
            )
            done = (rollout * STEPS_PER_ROLLOUT + part) / (options.rollouts * STEPS_PER_ROLLOUT)
            rate = options.rate_times * (FIRST_RATE + done * (LAST_RATE - FIRST_RATE))
            step = training.optim_step(
                types.AdamParams(
                    learning_rate=rate, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
                )
            )
        step.result()
    if last in theirs:
        print(
            f"reward {ours[last]:.3f}, train.py {theirs[last]:.3f} after {last} rollouts; both "
            f"began at {ours[0]:.3f}, {theirs[0]:.3f}"
        )
    client.close("success").result()


if __name__ == "__main__":
    main()
