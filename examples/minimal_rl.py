"""A complete RL loop in one file: prompts, responses, rewards, advantages, optimizer steps, weight
sync.

    bash scripts/demo.sh
    python examples/minimal_rl.py --demo outputs/demo-sapo-tp2
    torchrun --nproc-per-node 2 examples/minimal_rl.py --demo outputs/demo-sapo-tp2 \
        --tensor-model-parallel-size 2

It uses the prompts and the warm-started model of the demo and reaches the demo's score. Unknown
flags are passed to train.py's parser. train.py adds to this loop: a resumable data source, rewards
in worker processes with time limits, distributed sampling or SGLang, partial and asynchronous
rollouts, off-policy correction, a reference model, a critic, numeric guards, checkpoints and
reports. The algorithm is the same.

Axes in names: B samples of an optimizer step, R tokens of a response.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_patches
from slime_like import parse_args

FLAGS = (
    "--policy-loss-type sapo --sapo-tau-pos 1.0 --sapo-tau-neg 1.05 --entropy-coef 0.01 --lr 1e-3 "
    "--lr-decay-style linear --min-lr 2e-4 --num-steps-per-rollout 2 --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 8 --micro-batch-size 64"
)


@dataclass(frozen=True)
class Row:
    """A tokenized prompt and its answer."""

    tokens: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    row: Row
    group: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # [R], from the rollout engine
    reward: float


def read_rows(file: Path, tokenizer: Any) -> list[Row]:
    rows = []
    with file.open(encoding="utf-8", newline="\n") as lines:
        for row in map(json.loads, lines):
            text = tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, tokenize=False
            )
            rows.append(Row(tuple(tokenizer.encode(text, add_special_tokens=False)), row["answer"]))
    return rows


def reward(answer: str, response: str) -> float:
    """Fraction of letters in the right position; extra letters count as wrong."""
    said, right = response.strip().lower(), answer.lower()
    return sum(a == b for a, b in zip(right, said)) / max(len(right), len(said))


def sample(
    engine: Any, tokenizer: Any, rows: list[Row], n: int, *, max_tokens: int, first_id: int
) -> list[Response]:
    """Sample n responses per row. Every rank samples all of them on its own engine: a response
    depends only on its seed and the weights, so all ranks get the same."""
    from slime_like import GenerateRequest, SamplingParams

    requests = [
        GenerateRequest(
            sample_id=first_id + i, prompt_tokens=rows[i // n].tokens, seed=first_id + i
        )
        for i in range(n * len(rows))
    ]
    outputs = engine.generate(requests, SamplingParams(max_new_tokens=max_tokens))
    responses = []
    for i, output in enumerate(outputs):
        row = rows[i // n]
        text = tokenizer.decode(output.tokens, skip_special_tokens=True)
        score = reward(row.answer, text)
        responses.append(Response(row, i // n, output.tokens, output.log_probs, score))
    return responses


def train_samples(responses: list[Response], advantages: Any) -> list[Any]:
    """Build the train samples of one optimizer step.

    Args:
        responses: B of them.
        advantages: [B].
    """
    import torch

    from slime_like import TrainSample, reduction_weights

    lengths_B = torch.tensor([len(r.tokens) for r in responses])
    # 1 / (B R): the mean over tokens of each sample, then over the samples of the step
    weights_B = reduction_weights("sequence_mean", active_tokens=lengths_B)
    return [
        TrainSample(
            tokens=torch.tensor([*r.row.tokens, *r.tokens]),
            response_length=len(r.tokens),
            loss_mask=torch.ones(len(r.tokens), dtype=torch.bool),
            loss_weights=torch.full((len(r.tokens),), float(weight)),
            advantages=torch.full((len(r.tokens),), float(advantage)),
            rollout_log_probs=torch.tensor(r.log_probs),
        )
        for r, weight, advantage in zip(responses, weights_B, advantages, strict=True)
    ]


def with_old_log_probs(backend: Any, samples: list[Any]) -> list[Any]:
    """Add the policy's log-probs before the update, the denominators of the ratios."""
    import dataclasses

    computed = backend.forward(samples)
    return [
        dataclasses.replace(sample, old_log_probs=found.log_probs)
        for sample, found in zip(samples, computed, strict=True)
    ]


def own_share(items: list[Any], layout: Any) -> list[Any]:
    """The contiguous share of an optimizer step for this data-parallel rank."""
    size = len(items) // layout.dp_size
    return items[layout.dp_rank * size : (layout.dp_rank + 1) * size]


def train(config: Any, layout: Any, demo: Path) -> list[float]:
    """The loop. Returns the held-out score before training and after every 20 rollouts."""
    import torch
    from transformers import AutoTokenizer

    from slime_like import LocalEngine, MegatronBackend, TrainBatch, compute_advantages

    model = config.model.hf_checkpoint
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = read_rows(demo / "train.jsonl", tokenizer)
    heldout = read_rows(demo / "heldout.jsonl", tokenizer)
    rollouts, steps = config.rollout.num_rollout, config.algorithm.num_steps_per_rollout
    batch_size, group_size = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    limit = config.rollout.rollout_max_response_len
    backend = MegatronBackend(config, layout, total_steps=rollouts * steps)
    engine = LocalEngine(model, tokenizer)
    order = random.Random(0)
    scores = []

    for rollout in range(rollouts + 1):
        engine.update_weights(backend.export_weights(), version=rollout)
        if rollout % 20 == 0 or rollout == rollouts:
            tests = sample(
                engine, tokenizer, heldout, 4, max_tokens=limit, first_id=-(10**9) - 10**6 * rollout
            )
            scores.append(sum(r.reward for r in tests) / len(tests))
            if layout.rank == 0:
                print(f"rollout {rollout}/{rollouts}  held out {scores[-1]:.4f}", flush=True)
        if rollout == rollouts:
            break

        rows = order.sample(prompts, batch_size)
        first_id = rollout * batch_size * group_size
        responses = sample(engine, tokenizer, rows, group_size, max_tokens=limit, first_id=first_id)
        advantages_B = compute_advantages(
            "grpo",
            rewards=torch.tensor([r.reward for r in responses]),
            group_ids=torch.tensor([r.group for r in responses]),
            lengths=torch.tensor([len(r.tokens) for r in responses]),
        ).values

        size = len(responses) // steps
        batches = []
        for start in range(0, len(responses), size):
            part = slice(start, start + size)
            samples = train_samples(responses[part], advantages_B[part])
            # compute the old log-probs of all steps before the first step changes the weights
            batches.append(with_old_log_probs(backend, own_share(samples, layout)))
        for batch in batches:
            pending = backend.forward_backward(TrainBatch(tuple(batch)))
            backend.optim_step(pending)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo-sapo-tp2"))
    parser.add_argument("--num-rollout", type=int, default=160)
    own, others = parser.parse_known_args()
    flags = [
        *("--hf-checkpoint", str(own.demo / "sft/hf"), "--num-rollout", str(own.num_rollout)),
        *("--prompt-data", str(own.demo / "train.jsonl"), "--input-key", "messages"),
        *("--apply-chat-template", "--custom-rm-path", f"{__file__}:reward"),
        *FLAGS.split(),
        *others,
    ]
    config = parse_args(flags, world_size=int(os.environ.get("WORLD_SIZE", "1")))

    megatron_patches.apply()  # before megatron-core is imported
    from slime_like import process_groups

    with process_groups(
        config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
    ) as layout:
        train(config, layout, own.demo)


if __name__ == "__main__":
    main()
