"""tinker-cookbook's loops, unmodified, on local files: its library's (through
examples/tinker/cookbook_*.py), and its flat recipes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.cookbook.conftest import Cookbook
from tests.e2e.api_server import ApiServer

# recipes look the renderer up by a name they know; here it is a folder with the demo's model
HUB_NAME = "Qwen/Qwen3-8B-Base"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
# as tinker_cookbook.recipes.rl_loop begins every conversation
PREFIX = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
        "positions 3, 8, and 9. \\boxed{3}",
    },
]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def column(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows(folder / "metrics.jsonl") if name in row]


def test_the_librarys_loops(demo: Path, cookbook: Cookbook, tmp_path: Path) -> None:
    """supervised.train from nothing with the SDK's defaults, rl.train from its state, and rl.train
    again from where that one ended."""
    sl, rl, ahead = tmp_path / "sl", tmp_path / "rl", tmp_path / "ahead"
    with ApiServer(demo / "model", tmp_path / "server") as server:
        common = ("--base-url", server.url, "--model", demo / "model")
        cookbook(
            "examples/tinker/cookbook_sl.py",
            *common,
            "--data",
            demo / "train.jsonl",
            "--log-path",
            sl,
            "--steps",
            24,
            "--learning-rate",
            "5e-3",
        )
        nll, test = column(sl, "train_mean_nll"), column(sl, "test/nll")
        assert len(nll) == 24 and nll[0] > 4 and nll[-1] < 1.6 and test[-1] < 2
        sizes = ("--batch-size", 8, "--heldout-size", 16)
        for steps in (2, 4):
            cookbook(
                "examples/tinker/cookbook_rl.py",
                *common,
                "--data",
                demo,
                "--log-path",
                rl,
                "--start-from",
                sl,
                "--steps",
                steps,
                *sizes,
            )
            assert len(column(rl, "progress/batch")) == steps
        # its asynchronous default: stable_reinforce, on records of the server
        cookbook(
            "examples/tinker/cookbook_rl.py",
            *common,
            "--data",
            demo,
            "--log-path",
            ahead,
            "--start-from",
            sl,
            "--steps",
            3,
            "--max-steps-off-policy",
            1,
            *sizes,
        )
        assert (
            len(column(ahead, "grad_norm")) == 3 and max(column(ahead, "async/staleness_max")) <= 1
        )
    differences = column(rl, "optim/kl_sample_train_v1")
    assert len(differences) == 4 and max(map(abs, differences)) < 1e-4, (
        "samplers and trainer have the same weights"
    )
    assert (
        len(column(rl, "env/all/reward/total")) == 4 and max(column(rl, "env/all/reward/total")) > 0
    )
    assert [r["batch"] for r in rows(rl / "checkpoints.jsonl")][-1] == 4


def test_the_recipes(demo: Path, cookbook: Cookbook, tmp_path: Path) -> None:
    """recipes.sl_loop teaches the form of an answer, recipes.rl_loop continues from its state: data
    and model lie under their hub names."""
    rng = random.Random(0)
    asked = [rng.randrange(10) for _ in range(512)]
    questions = [
        {"question": f"What is {DIGITS[n]}?", "answer": f"It is {n}.\n#### {n}"} for n in asked
    ]
    chats = [
        {
            "messages": [
                *PREFIX,
                {"role": "user", "content": q["question"] + SUFFIX},
                {"role": "assistant", "content": f"\\boxed{{{n}}}"},
            ]
        }
        for q, n in zip(questions, asked, strict=True)
    ]
    write(tmp_path / "HuggingFaceH4" / "no_robots" / "train.jsonl", chats)
    write(tmp_path / "openai" / "gsm8k" / "main" / "train.jsonl", questions)
    (tmp_path / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    )
    (tmp_path / "Qwen").mkdir()
    (tmp_path / HUB_NAME).symlink_to(demo / "model")
    with ApiServer(demo / "model", tmp_path / "server", "--served-model-name", HUB_NAME) as server:

        def recipe(name: str, **settings: object) -> Path:
            log = tmp_path / name
            given = {"base_url": server.url, "model_name": HUB_NAME, "log_path": log, **settings}
            cookbook(
                "-m",
                f"tinker_cookbook.recipes.{name}",
                *(f"{key}={value}" for key, value in given.items()),
                folder=tmp_path,
            )
            return log

        supervised = recipe(
            "sl_loop",
            batch_size=8,
            max_steps=50,
            learning_rate=1e-2,
            train_on_what="last_assistant_message",
        )
        nll = column(supervised, "train_mean_nll")
        assert nll[0] > 4 and nll[-1] < 1
        # a recipe continues from the last state in its folder
        last = rows(supervised / "checkpoints.jsonl")[-1]
        write(tmp_path / "rl_loop" / "checkpoints.jsonl", [{**last, "batch": 0}])
        learned = recipe(
            "rl_loop",
            batch_size=8,
            group_size=8,
            max_steps=8,
            max_tokens=20,
            learning_rate=2e-3,
            save_every=4,
        )
    rewards = column(learned, "reward/total")
    assert len(rewards) == 8 and max(rewards) > 0
    assert any("grad_norm" in row for row in rows(learned / "metrics.jsonl")), (
        "the recipe makes no step from a batch without differences"
    )
