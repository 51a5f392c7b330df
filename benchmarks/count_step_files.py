"""Count the project's files that one training step executes: a measure of what a reader must open.

    python benchmarks/count_step_files.py [--json out.json]

Makes a tiny model, runs two rollouts with default flags on one process in this process, and watches
the second: every function of the project that is called, on any thread, counts its file once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGES = ("slime_like", "arguments", "megatron_patches")


class EnteredFiles:
    """Context manager that records the files of all called functions."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> EnteredFiles:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.names.add(frame.f_code.co_filename)

    def of_the_project(self) -> list[str]:
        """Recorded files of the project, sorted, relative to the repository."""
        paths = [Path(name) for name in self.names]
        inside = [p.relative_to(ROOT) for p in paths if p.is_relative_to(ROOT)]
        return sorted(str(p) for p in inside if p.parts[0] in PACKAGES)


def second_step(folder: Path) -> list[str]:
    """Files that the second of two rollouts enters, with default flags.

    Args:
        folder: Empty folder for the model, its prompts and the run's output.
    """
    from slime_like.trainer.launch import quiet_dependencies

    quiet_dependencies()
    import megatron_patches
    from scripts.make_demo import make_rows
    from slime_like.cli.tiny_model import save_model

    save_model(folder / "model", hidden_size=32, num_layers=2)
    rows = make_rows(min_word_len=2, max_word_len=4, size=8, seed=1)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    megatron_patches.apply()
    from arguments.parse import parse_args
    from slime_like.megatron.init import process_groups
    from slime_like.trainer.trainer import Trainer

    flags = (
        f"--hf-checkpoint {folder}/model --prompt-data {data} --input-key messages --label-key "
        "answer --apply-chat-template --rm-type exact_match --lr 1e-4 --num-rollout 2 "
        "--rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8 "
        f"--no-progress --output-dir {folder}/out"
    )
    config = parse_args(flags.split(), world_size=1)
    groups = process_groups(
        config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed
    )
    with groups as layout:
        trainer = Trainer(config, layout, folder / "out")
        try:
            trainer.step(0)
            with EnteredFiles() as entered:
                trainer.step(1)
        finally:
            trainer.close()
    return entered.of_the_project()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the list of files there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = second_step(Path(folder))
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files}
    for name in files:
        print(f"{lines[name]:5d}  {name}")
    by_folder = Counter(str(Path(name).parent) for name in files)
    print(", ".join(f"{folder} {count}" for folder, count in by_folder.items()))
    print(f"{len(files)} files, {sum(lines.values())} lines")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(files, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
