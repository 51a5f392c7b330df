"""tinker-cookbook's supervised loop (tinker_cookbook.supervised.train) as it comes from PyPI, on
conversations of a local file.

    make cookbook-env  # installs tinker-cookbook into its own environment
    python scripts/make_demo.py --output-dir outputs/demo --max-word-len 4
    python -m slime_like.tinker --hf-checkpoint outputs/demo/model
    .venv-cookbook/bin/python examples/tinker/cookbook_sl.py --log-path outputs/cookbook/sl

Every line of --data has messages and the answer to them. --model is a folder, so that the tokenizer
is not looked for on a model hub.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path

from common import json_lines
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RENDERER = "role_colon"  # plain text, "User: ...", which any tokenizer has words for


def conversations(data: Path, folder: Path) -> Path:
    """The same rows with the answer as the assistant's message: what the cookbook reads."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "conversations.jsonl"
    with data.open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as file:
        for row in map(json.loads, rows):
            file.write(
                json.dumps(
                    {
                        "messages": [
                            *row["messages"],
                            {"role": "assistant", "content": row["answer"]},
                        ]
                    }
                )
                + "\n"
            )
    return target


def metrics_of(log_path: Path, name: str) -> list[float]:
    """One metric of a cookbook's run, over its steps."""
    return [row[name] for row in json_lines(log_path / "metrics.jsonl") if name in row]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="outputs/demo/model")
    parser.add_argument("--data", type=Path, default=Path("outputs/demo/train.jsonl"))
    parser.add_argument("--log-path", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=32, help="of the adapter; 0 trains all weights")
    parser.add_argument("--steps", type=int, default=112)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-local-example")

    rows = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=options.model,
        renderer_name=RENDERER,
        max_length=256,
        batch_size=options.batch_size,
    )
    file = conversations(options.data, options.log_path)
    config = train.Config(
        log_path=str(options.log_path),
        model_name=options.model,
        recipe_name="slime_like_cookbook_sl",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(
            file_path=str(file), test_size=64, common_config=rows
        ),
        learning_rate=options.learning_rate,
        lora_rank=options.rank,
        base_url=options.base_url,
        num_epochs=1000,
        max_steps=options.steps,
        save_every=0,
        eval_every=max(1, options.steps // 4),
    )
    asyncio.run(train.main(config))
    found = metrics_of(options.log_path, "train_mean_nll")
    last = json_lines(options.log_path / "checkpoints.jsonl")[-1]
    print(f"nll {found[0]:.3f} -> {found[-1]:.3f}; state {last['state_path']}")


if __name__ == "__main__":
    main()
