"""tinker-cookbook's RL loop (tinker_cookbook.rl.train) as it comes from PyPI, on the demo's task
from a local file.

    .venv-cookbook/bin/python examples/tinker/cookbook_rl.py --log-path outputs/cookbook/rl
    --start-from outputs/cookbook/sl

continues from the result of cookbook_sl.py (which also explains the server). The reward is the
fraction of letters in the right position, as in scripts/demo.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
from common import json_lines
from cookbook_sl import RENDERER, metrics_of
from tinker_cookbook import renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer


class Spelling(ProblemEnv):
    """One question of a file, and its answer."""

    def __init__(self, renderer: renderers.Renderer, row: dict[str, Any]) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.row = row

    def get_question(self) -> str:
        return str(self.row["messages"][-1]["content"])

    def check_answer(self, sample_str: str) -> float:
        """Fraction of letters in the right position; extra letters count as wrong."""
        expected, answer = self.row["answer"].lower(), sample_str.strip().lower()
        return sum(a == b for a, b in zip(expected, answer)) / max(len(expected), len(answer))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return str(self.row["answer"])


class Rows(RLDataset):
    """Rows in their order, `batch_size` at a time, each for `group_size` attempts."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        renderer: renderers.Renderer,
        batch_size: int,
        group_size: int,
    ) -> None:
        self.rows, self.renderer, self.batch_size, self.group_size = (
            rows,
            renderer,
            batch_size,
            group_size,
        )

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        part = self.rows[index * self.batch_size : (index + 1) * self.batch_size]
        return [
            ProblemGroupBuilder(functools.partial(Spelling, self.renderer, row), self.group_size)
            for row in part
        ]

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size


@chz.chz
class LocalRows(RLDatasetBuilder):
    """Training and held-out rows of two files."""

    model_name: str
    train_file: str
    heldout_file: str
    batch_size: int
    group_size: int
    heldout_size: int

    async def __call__(self) -> tuple[RLDataset, RLDataset]:
        renderer = renderers.get_renderer(RENDERER, get_tokenizer(self.model_name))
        rows, heldout = (json_lines(file) for file in (self.train_file, self.heldout_file))
        heldout = heldout[: self.heldout_size]
        return Rows(rows, renderer, self.batch_size, self.group_size), Rows(
            heldout, renderer, len(heldout), 4
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="outputs/demo/model")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("outputs/demo"),
        help="folder of train.jsonl and heldout.jsonl",
    )
    parser.add_argument("--log-path", type=Path, required=True)
    parser.add_argument(
        "--start-from",
        type=Path,
        help="log path of cookbook_sl.py; without it, a new adapter on --model",
    )
    parser.add_argument(
        "--rank", type=int, default=32, help="of a new adapter; 0 trains all weights"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--heldout-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--max-steps-off-policy",
        type=int,
        help="sample this many steps ahead, with the cookbook's loss for it; default: synchronous",
    )
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-local-example")

    start = None
    if options.start_from is not None:
        start = json_lines(options.start_from / "checkpoints.jsonl")[-1]["state_path"]
    rows = LocalRows(
        model_name=options.model,
        train_file=str(options.data / "train.jsonl"),
        heldout_file=str(options.data / "heldout.jsonl"),
        batch_size=options.batch_size,
        group_size=options.group_size,
        heldout_size=options.heldout_size,
    )
    ahead = options.max_steps_off_policy
    config = train.Config(
        async_config=None
        if ahead is None
        else train.AsyncConfig(max_steps_off_policy=ahead, groups_per_batch=options.batch_size),
        learning_rate=options.learning_rate,
        dataset_builder=rows,
        model_name=options.model,
        recipe_name="slime_like_cookbook_rl",
        renderer_name=RENDERER,
        max_tokens=16,
        log_path=str(options.log_path),
        lora_rank=options.rank,
        load_checkpoint_path=start,
        base_url=options.base_url,
        max_steps=options.steps,
        eval_every=max(1, options.steps // 4),
        save_every=max(1, options.steps // 2),
        num_groups_to_log=0,
    )
    asyncio.run(train.main(config))
    rewards = metrics_of(options.log_path, "env/all/reward/total")
    heldout = metrics_of(options.log_path, "test/env/all/reward/total")
    print(
        f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; held-out {heldout[0]:.3f} -> "
        f"{heldout[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
