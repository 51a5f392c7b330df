"""Every policy loss and every advantage estimator on the demo's task, as one table of the
evaluation reward before and after.

    # all rows, one run of a minute after the other
    python benchmarks/loss_table.py --output-dir outputs/loss_table
    python benchmarks/loss_table.py --output-dir outputs/loss_table --only sapo rloo
    python benchmarks/loss_table.py --output-dir outputs/loss_table --write-docs

All runs start from one supervised warm start and share every setting but those that the table
shows. The rows are the names of the two registries, so a new loss or estimator is in the table
without a change here; `ROWS_OF_LOSSES` and `ROWS_OF_ESTIMATORS` hold settings that differ from the
defaults, and further rows of the same name. Supervised losses, which read no advantages, have no
row. A run that is there with the same command line is not repeated. The result is in `table.json`;
--write-docs puts it into the documents.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.warm_start import run, train_command, warm_start  # noqa: E402
from slime_like.advantages import TurnEstimator, advantage_estimators  # noqa: E402
from slime_like.losses import policy_losses  # noqa: E402
from slime_like.metrics.logger import read_metrics  # noqa: E402

EVAL = "eval/heldout/mean"
RL = (
    "--num-rollout {rollouts} --rollout-batch-size 16 --n-samples-per-prompt 8 "
    "--num-steps-per-rollout 4 --micro-batch-size 32 "
    "--lr 1e-3 --lr-decay-style linear --min-lr 1e-4 --lr-warmup-iters 20 --entropy-coef 0.01 "
    "--eval-interval {rollouts}"
)
# Registered name -> (label, flags) of each of its rows, instead of the defaults.
ROWS_OF_LOSSES: Mapping[str, Sequence[tuple[str, str]]] = {
    "ppo": (
        ("ppo", ""),
        ("ppo, second seed", "--seed 2 --rollout-seed 2"),
        ("ppo, clip-higher", "--eps-clip 0.2 --eps-clip-high 0.28 --loss-reduction token_mean"),
        ("dual_clip", "--eps-clip-c 3"),
    ),
    "gpg": (("gpg", ""), ("gpg, second seed", "--seed 2 --rollout-seed 2")),
    "rollout_is": (("rollout_is", ""), ("rollout_is, second seed", "--seed 2 --rollout-seed 2")),
    "gspo": (("gspo", "--eps-clip 3e-4 --eps-clip-high 4e-4 --loss-reduction sequence_mean"),),
    "gmpo": (("gmpo", "--loss-reduction sequence_mean"),),
    "luspo": (("luspo", "--eps-clip 2e-3 --eps-clip-high 2.5e-3 --loss-reduction sequence_mean"),),
    "sapo": (("sapo", "--loss-reduction sequence_mean"),),
    "cispo": (
        ("cispo", "--loss-reduction token_mean"),
        ("cispo, anchor rollout", "--loss-reduction token_mean --cispo-anchor rollout"),
    ),
    "dppo": (
        ("dppo_tv", "--dppo-type binary_tv"),
        ("dppo_kl", "--dppo-type binary_kl --dppo-delta-low 0.05 --dppo-delta-high 0.05"),
    ),
    "dro": (("dro", "--dro-beta 0.3"),),
    "vespo": (("vespo", "--loss-reduction token_mean"),),
}
ROWS_OF_ESTIMATORS: Mapping[str, Sequence[tuple[str, str]]] = {
    "grpo": (("grpo", ""), ("grpo without std (Dr. GRPO)", "--disable-grpo-std-normalization")),
    # the demo's reward has one component, which causes a warning
    "gdpo": (("gdpo, of one reward", ""),),
    "reinforce_plus_plus": (("reinforce_plus_plus", "--normalize-advantages"),),
    "reinforce_plus_plus_baseline": (("reinforce_plus_plus_baseline", "--normalize-advantages"),),
    # here the greedy response is better than the sampled ones, so without whitening nearly all
    # advantages are negative
    "remax": (("remax, whitened", "--normalize-advantages"), ("remax", "")),
    "ppo": (
        ("ppo, with a critic", "--normalize-advantages --critic-lr 3e-3 --num-critic-only-steps 3"),
    ),
}
HEADINGS = {
    "en": ("loss or estimator", "flags", "before", "after", "clipped", "rollouts", "CPU seconds"),
    "zh": ("损失或优势估计", "参数", "训练前", "训练后", "裁剪比例", "rollout 数", "CPU 秒数"),
}
DAYS = {"en": "Runs of {days}.", "zh": "运行日期：{days}。"}


@dataclass(frozen=True)
class Row:
    """One run."""

    kind: str  # "losses" or "estimators", the table that it belongs to
    name: str
    label: str
    flags: str  # its flags in addition to the common ones


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    kind: str
    name: str
    label: str
    flags: str
    before: float  # evaluation reward
    after: float  # evaluation reward
    # fraction of clipped tokens, averaged over the run; None for a loss without clipping
    clipped: float | None
    rollouts: int
    cpu_s: float
    command: str
    date: str


def rows() -> list[Row]:
    """All rows, from the registries. Losses are run with grpo's advantages, estimators with the ppo
    loss."""
    result = []
    for name, loss in policy_losses.items():
        if "advantages" in loss.needs:
            for label, flags in ROWS_OF_LOSSES.get(name, ((name, ""),)):
                result.append(
                    Row(
                        "losses",
                        name,
                        label,
                        f"--policy-loss-type {name} --advantage-estimator grpo {flags}".strip(),
                    )
                )
    for name, entry in advantage_estimators.items():
        if isinstance(entry, TurnEstimator):  # for agents only
            continue
        for label, flags in ROWS_OF_ESTIMATORS.get(name, ((name, ""),)):
            result.append(
                Row(
                    "estimators",
                    name,
                    label,
                    f"--policy-loss-type ppo --advantage-estimator {name} {flags}".strip(),
                )
            )
    return result


def is_further(row: Row) -> bool:
    """Whether it is not the first row of its name; these are run last."""
    named = (ROWS_OF_LOSSES if row.kind == "losses" else ROWS_OF_ESTIMATORS).get(row.name)
    return named is not None and row.label != named[0][0]


def folder_of(row: Row) -> str:
    """Folder name, derived from the flags, so that equal runs of the two tables share it."""
    words = (
        row.flags.replace("--policy-loss-type ", "")
        .replace("--advantage-estimator ", "")
        .replace("--", "")
    )
    return "".join(c if c.isalnum() or c in "-." else "_" for c in words)


def cpu_seconds() -> float:
    """CPU seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def finished(row: Row, rollouts: int, model: Path, out: Path) -> Result | None:
    """The result of an earlier run with the same command line; None without one."""
    folder = out / folder_of(row)
    if not (folder / "result.json").exists():
        return None
    found = Result(**json.loads((folder / "result.json").read_text(encoding="utf-8")))
    same = found.command == command_line_of(row, rollouts, model, out)
    return replace(found, **asdict(row)) if same else None


def command_of(row: Row, rollouts: int, model: Path, out: Path) -> list[str]:
    return train_command(
        f"{RL.format(rollouts=rollouts)} {row.flags}", model, out / folder_of(row), out
    )


def command_line_of(row: Row, rollouts: int, model: Path, out: Path) -> str:
    """The command line of a row, without the interpreter."""
    return shlex.join(command_of(row, rollouts, model, out)[1:])


def measure(row: Row, rollouts: int, model: Path, out: Path) -> Result:
    """The result of `row`; an earlier run with the same command line is reused."""
    folder = out / folder_of(row)
    found = finished(row, rollouts, model, out)
    if found is not None:
        return found
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    before = cpu_seconds()
    run(command_of(row, rollouts, model, out), out / f"logs/{folder.name}.txt")
    cpu_s = cpu_seconds() - before
    metrics = read_metrics(folder / "metrics.jsonl")
    rewards = [line[EVAL] for line in metrics if EVAL in line]
    clipped = [line["train/pg_clipfrac"] for line in metrics if "train/pg_clipfrac" in line]
    result = Result(
        **asdict(row),
        before=rewards[0],
        after=rewards[-1],
        clipped=sum(clipped) / len(clipped) if clipped else None,
        rollouts=rollouts,
        cpu_s=round(cpu_s, 1),
        command=command_line_of(row, rollouts, model, out),
        date=time.strftime("%Y-%m-%d"),
    )
    (folder / "result.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return result


def one_table(results: Sequence[Result], language: str) -> str:
    """The table in Markdown."""
    heads = HEADINGS[language]
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for r in results:
        clipped = "–" if r.clipped is None else f"{100 * r.clipped:.1f} %"
        cells = (
            r.label,
            f"`{r.flags}`",
            f"{r.before:.3f}",
            f"{r.after:.3f}",
            clipped,
            str(r.rollouts),
            f"{r.cpu_s:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_docs(results: Sequence[Result]) -> None:
    """Write the tables between their marks on the results page, in both languages; losses and
    estimators have separate marks."""
    for language in HEADINGS:
        page = ROOT / "docs" / language / "algorithms" / "results.md"
        text = page.read_text(encoding="utf-8")
        for kind in ("losses", "estimators"):
            begin = f"<!-- {kind}: made by benchmarks/loss_table.py -->\n"
            end = f"<!-- {kind}: end -->"
            head, rest = text.split(begin)
            _, tail = rest.split(end)
            rows = [r for r in results if r.kind == kind]
            days = " – ".join(sorted({min(r.date for r in rows), max(r.date for r in rows)}))
            table = f"{DAYS[language].format(days=days)}\n\n{one_table(rows, language)}\n"
            text = f"{head}{begin}{table}{end}{tail}"
        page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "loss_table")
    parser.add_argument("--num-rollouts", type=int, default=48)
    parser.add_argument("--only", nargs="+", help="names of losses and estimators")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/*/algorithms/results.md"
    )
    parser.add_argument(
        "--finished-only",
        action="store_true",
        help="a table of the runs that are there; none is made",
    )
    options = parser.parse_args()
    out = options.output_dir.resolve()
    model = out / "sft/hf" if options.finished_only else warm_start(out)
    chosen = [row for row in rows() if options.only is None or row.name in options.only]
    if options.finished_only:
        chosen = [row for row in chosen if finished(row, options.num_rollouts, model, out)]
    results: dict[Row, Result] = {}
    for i, row in enumerate(sorted(chosen, key=is_further)):
        try:
            result = measure(row, options.num_rollouts, model, out)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{i + 1}/{len(chosen)} {row.label}: FAILED\n{error}", flush=True)
            continue
        results[row] = result
        print(
            f"{i + 1}/{len(chosen)} {row.label}: {result.before:.3f} -> {result.after:.3f} "
            f"({result.cpu_s:.0f} CPU s)",
            flush=True,
        )
    done = [results[row] for row in chosen if row in results]
    (out / "table.json").write_text(
        json.dumps([asdict(r) for r in done], indent=1), encoding="utf-8"
    )
    for kind in ("losses", "estimators"):
        print(f"\n{one_table([r for r in done if r.kind == kind], 'en')}")
    if options.write_docs:
        write_docs(done)
    return 0 if len(done) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
