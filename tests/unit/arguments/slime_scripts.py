"""slime's launch scripts as flag names and values (`slime_scripts.json`), and the files that they
name: a config.json with the real numbers, rows of prompts, modules and YAML files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("slime_scripts.json")
ROOT = "/files"  # below which the scripts have their files
ROW: Mapping[str, Any] = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "problem": "1+1=",
    "index": "0",
    "label": "2",
    "answer": "2",
    "reward_model": "2",
    "images": [],
    "metadata": {},
    "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
}
FOLDERS = ("--ref-load", "--load", "--opd-teacher-load")
ROWS = ("--prompt-data", "--eval-prompt-data")
YAML: Mapping[str, str] = {
    "--custom-config-path": "tis_mode: truncate\ntis_upper_bound: 2.0\n",
    "--eval-config": (
        "eval:\n  defaults:\n    max_response_len: 16384\n    top_p: 0.7\n  datasets:\n"
        + "".join(
            f"    - name: {name}\n      path: {{root}}/{name}.jsonl\n      rm_type: {rm}\n"
            for name, rm in (("aime", "deepscaler"), ("gpqa", "gpqa"), ("ifbench", "ifbench"))
        )
    ),
    "--sglang-config": "{}\n",
}
OWN_PREFIXES = ("slime.", "http")


@dataclass(frozen=True, slots=True)
class SlimeScript:
    """A launch script of slime."""

    name: str
    program: str
    checkpoint: Mapping[str, Any]  # its config.json
    flags: tuple[tuple[str, ...], ...]  # the words of each, as the script has them

    def of(self, flag: str) -> tuple[str, ...] | None:
        """The values of a flag; None where the script does not have it."""
        return next((words[1:] for words in reversed(self.flags) if words[0] == flag), None)

    @property
    def world_size(self) -> int:
        nodes, gpus = self.of("--actor-num-nodes"), self.of("--actor-num-gpus-per-node")
        assert nodes is not None and gpus is not None
        return int(nodes[0]) * int(gpus[0])


def slime_scripts() -> dict[str, SlimeScript]:
    table = json.loads(TABLE.read_text())
    return {
        name: SlimeScript(
            name,
            entry["program"],
            table["checkpoints"][entry["checkpoint"]],
            tuple(tuple(words) for words in entry["flags"]),
        )
        for name, entry in table["scripts"].items()
    }


def _rows(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([dict(ROW) | {"metadata": "{}"}]), path
        )
    else:
        path.write_text(json.dumps(ROW) + "\n")


def command_line(script: SlimeScript, folder: Path) -> list[str]:
    """The words that follow train.py, with /files below `folder`, and what they name written there."""
    argv: list[str] = []
    for flag, *values in script.flags:
        words = [str(folder) + word if word.startswith(ROOT) else word for word in values]
        words = [str(folder / word[2:]) if word.startswith("./") else word for word in words]
        if flag == "--hf-checkpoint":
            path = Path(words[0])
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(dict(script.checkpoint)))
        elif flag in FOLDERS:
            path = Path(words[0])
            path.mkdir(parents=True, exist_ok=True)
            (path / "latest_checkpointed_iteration.txt").write_text("release")
        elif flag in ROWS:
            for word in words:
                if word.startswith(str(folder)):
                    _rows(Path(word))
        elif flag in YAML:
            words = [str(folder / Path(words[0]).name)]
            Path(words[0]).write_text(YAML[flag].replace("{root}", str(folder)))
            for name in ("aime", "gpqa", "ifbench"):
                _rows(folder / f"{name}.jsonl")
        argv += [flag, *words]
    return argv


@contextmanager
def modules_of(script: SlimeScript, folder: Path) -> Iterator[None]:
    """Stand-ins for the modules whose functions the script names, on the path while this lasts."""
    before = set(sys.modules)
    for flag, *values in script.flags:
        if not flag.endswith("-path") or not values or values[0].startswith((ROOT, *OWN_PREFIXES)):
            continue
        module, _, function = values[0].rpartition(".")
        if not module or "/" in values[0]:
            continue
        path = folder / "modules" / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"async def {function}(args, *others):\n    return None\n")
    sys.path.insert(0, str(folder / "modules"))
    try:
        yield
    finally:
        sys.path.remove(str(folder / "modules"))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and str(folder) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]
