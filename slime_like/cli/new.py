"""slime-like new FOLDER: create a recipe to start from. It trains unchanged in about a minute of
one CPU: a tiny model with random weights learns to write a letter twice, and is graded on prompts
that it was not trained on.

The folder has train.jsonl and heldout.jsonl (the data), reward.py, test_reward.py, run.yaml and
model/. Replace them one by one; --hf-checkpoint selects your model instead of the tiny one.

Exit status: 0 written, 2 the folder has files already.
"""

from __future__ import annotations

import argparse
import json
import shutil
import string
import sys
from pathlib import Path

from arguments.hf.hub import download_hint

TEMPLATES = Path(__file__).parent / "recipe"
LETTERS = string.ascii_lowercase[:8]
VERBS = ("write", "say", "type", "spell")
TIMES = 2  # repetitions of the letter


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="slime-like new",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("folder", type=Path, help="folder to create; must not contain files")
    result.add_argument(
        "--hf-checkpoint", help="folder of a Hugging Face model; default: a tiny one is created"
    )
    return result


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The prompts, with the labels for `reward.py`: to train on, and held out.

    Each letter is held out with one verb, and trained on with the others.
    """
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for i, letter in enumerate(LETTERS):
        for j, verb in enumerate(VERBS):
            part = held_out if j == i % len(VERBS) else train
            part.append({"prompt": f"{verb} {letter}:", "answer": letter * TIMES})
    return train, held_out


def write_recipe(folder: Path, hf_checkpoint: str | None) -> None:
    """Create the recipe. Raises ValueError if the folder is not empty, or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: has files already; name a new folder")
    if hf_checkpoint is not None and not Path(hf_checkpoint).is_dir():
        raise ValueError(
            f"--hf-checkpoint {hf_checkpoint}: no such folder; give that of a downloaded model"
            f"{download_hint(hf_checkpoint)}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if hf_checkpoint is None:
        from transformers.utils import logging  # slow to import

        from slime_like.cli.tiny_model import save_model

        logging.disable_progress_bar()
        save_model(folder / "model", hidden_size=64, num_layers=2)
    for template in sorted(TEMPLATES.glob("*.txt")):
        shutil.copyfile(template, folder / template.stem)
    settings = folder / "run.yaml"
    model = "model" if hf_checkpoint is None else str(Path(hf_checkpoint).absolute())
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("$MODEL", json.dumps(model)), encoding="utf-8")
    for name, part in zip(("train", "heldout"), rows(), strict=True):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)


def main() -> int:
    args = parser().parse_args()
    try:
        write_recipe(args.folder, args.hf_checkpoint)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.folder}: a recipe\n\n  cd {args.folder}\n  python -m pytest test_reward.py\n"
        "  slime-like train --config run.yaml\n  slime-like report outputs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
