"""slime-like new FOLDER: create a project to start from. It trains unchanged in a minute or two of
one CPU: a tiny model with random weights learns its task, and is graded on prompts that it was not
trained on. --starter chooses what the project shows; --list names the starters.

Replace the files one by one; --hf-checkpoint selects your model instead of the tiny one.

Exit status: 0 written, 2 the folder has files already, or the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from arguments.hf.hub import download_hint
from slime_like.text import did_you_mean

TEMPLATES = Path(__file__).parent / "starters"  # a folder a starter
SHARED = TEMPLATES / "shared"
ROWS = "make_rows.py"  # of every starter; writes its prompts into the current folder


@dataclass(frozen=True, slots=True)
class Starter:
    """A kind of project. Its files are those of its folder in TEMPLATES, each named as in the
    project with `.txt` after it."""

    help: str
    runs: tuple[str, ...] = ("run.yaml",)  # files of settings, in the order in which they train
    shared: tuple[str, ...] = (ROWS, "reward.py", "test_reward.py")  # files of SHARED
    package: str | None = None  # that it imports and slime_like does not need


WARM = ("sft.yaml", "run.yaml")
STARTERS = {
    "grpo": Starter("a reward of your own, and GRPO (the default)"),
    "lora": Starter("fine-tune, then train adapters on the frozen model", WARM),
    "ppo": Starter("PPO with a critic"),
    "tool": Starter("a model that calls a tool while it answers", WARM, ()),
    "agent": Starter("an agent that calls the model by a base URL", WARM, (), package="openai"),
    "sft-then-rl": Starter("fine-tune on a few answers, then train with a reward", WARM),
    "preferences": Starter("fine-tune, then learn from pairs of answers (DPO)", WARM),
}
DEFAULT = "grpo"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="slime-like new",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "folder", type=Path, nargs="?", help="folder to create; must not contain files"
    )
    result.add_argument(
        "--starter",
        type=_starter,
        choices=STARTERS,
        default=DEFAULT,
        help=f"what to create (default {DEFAULT})",
    )
    result.add_argument("--list", action="store_true", help="list the starters, and create nothing")
    result.add_argument(
        "--hf-checkpoint", help="folder of a Hugging Face model; default: a tiny one is created"
    )
    return result


def _starter(name: str) -> str:
    if name not in STARTERS:
        raise argparse.ArgumentTypeError(
            f"no starter {name!r}{did_you_mean(name, STARTERS)}; there are {', '.join(STARTERS)}"
        )
    return name


def write_project(folder: Path, hf_checkpoint: str | None, starter: str = DEFAULT) -> None:
    """Create the project. Raises ValueError if the folder is not empty, or is a file."""
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

        from slime_like.cli.tiny_model import ENDING_TEMPLATE, save_model

        logging.disable_progress_bar()
        save_model(folder / "model", hidden_size=64, num_layers=2, chat_template=ENDING_TEMPLATE)
    model = "model" if hf_checkpoint is None else str(Path(hf_checkpoint).absolute())
    shared = [SHARED / f"{name}.txt" for name in STARTERS[starter].shared]
    for template in [*shared, *sorted((TEMPLATES / starter).glob("*.txt"))]:
        text = template.read_text(encoding="utf-8")
        (folder / template.stem).write_text(
            text.replace("$MODEL", json.dumps(model)), encoding="utf-8"
        )
    subprocess.run([sys.executable, ROWS], cwd=folder, check=True)


def next_steps(folder: Path, starter: str) -> str:
    """What to type in a new project."""
    steps = [f"cd {folder}"]
    package = STARTERS[starter].package
    if package is not None and importlib.util.find_spec(package) is None:
        steps.append(f"python -m pip install {package}")
    if list(folder.glob("test_*.py")):
        steps.append("python -m pytest")
    train = [f"slime-like train --config {name}" for name in STARTERS[starter].runs]
    steps += [" && ".join(train), "slime-like report outputs"]
    return "\n".join(f"  {step}" for step in steps)


def main() -> int:
    args = parser().parse_args()
    if args.list:
        width = max(map(len, STARTERS))
        print("\n".join(f"{name:{width}}  {kind.help}" for name, kind in STARTERS.items()))
        return 0
    if args.folder is None:
        parser().error("name the folder to create, or give --list")
    try:
        write_project(args.folder, args.hf_checkpoint, args.starter)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.folder}: the starter {args.starter}\n\n{next_steps(args.folder, args.starter)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
