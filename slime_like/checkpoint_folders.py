"""Where checkpoints lie, and which of them is the newest. What is in one: megatron_backend/checkpoint.py.

<save>/latest_checkpointed_iteration.txt     the step of the newest complete checkpoint
<save>/iter_0000010/                         10 rollouts were trained on; complete once it holds trainer.json
"""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def complete_steps(root: str | Path) -> list[int]:
    """Steps of the checkpoints in `root`, ascending. One that was being written when its run died is not among them."""
    names = [path.parent.name for path in Path(root).glob("iter_*/trainer.json")]
    return sorted(int(name.removeprefix("iter_")) for name in names if name.removeprefix("iter_").isdigit())


def is_checkpoint_root(root: str | Path) -> bool:
    """Whether `root` holds checkpoints of ours, rather than a Hugging Face model or nothing."""
    return (Path(root) / TRACKER).exists() or bool(complete_steps(root))


def newest_step(root: str | Path) -> tuple[int, str | None]:
    """The step that the tracker names, and None. Where the tracker is missing, unreadable or names a checkpoint that is not there:
    the newest complete one, and a warning. Raises ValueError when there is none: a run never starts over unasked."""
    path, steps = Path(root) / TRACKER, complete_steps(root)
    try:
        named = int(path.read_text().strip())
        problem = None if named in steps else f"names step {named}, which is not there"
    except OSError:
        named, problem = None, "is missing"
    except ValueError:
        named, problem = None, "holds no step"
    if problem is None and named is not None:
        return named, None
    if not steps:
        raise ValueError(f"--load {root}: {TRACKER} {problem}, and there is no complete checkpoint beside it")
    return steps[-1], f"--load {root}: {TRACKER} {problem}; resuming from the newest complete checkpoint, step {steps[-1]}"
