"""Standard evaluation sets (--eval-sets): list those that have a name, or check a copy of one
before a run. A check reads every row, prints the first prompt, and grades the answers of the file:
the reward must accept them, and reject an empty one.

    slime-like eval-sets
    slime-like eval-sets humaneval gsm8k=data/gsm8k 'math-500=data/test.jsonl@[0:50]'

Exit status: 0 without problems, 1 if a reward disagrees with the file, or the file is none of the
set's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from arguments.eval_sets import SETS_FLAG, EvalSet, standard_eval_sets
from arguments.schema.data import EvalConfig
from slime_like.cli.exit_status import DAMAGE, UsageError, exit_status, on_the_cpu
from slime_like.data.standard_rows import open_standard
from slime_like.rewards.registry import answer_check, require_library
from slime_like.standard_sets import standard_sets

if TYPE_CHECKING:
    from slime_like.types import Sample

_SHOWN = 5  # rows of a problem


def listing() -> str:
    """All sets, one a paragraph."""
    lines = []
    for name in standard_sets.names():
        each = standard_sets.get(name)
        lines += [
            f"{name}: {each.about}",
            f"  reward {each.reward}; columns {', '.join(each.columns)}",
            f"  files {', '.join(each.files)} of {', '.join(each.hub)}",
        ]
        if each.package is not None:
            lines.append(f"  or pip install {each.package[2]}")
    return "\n".join(lines)


def check(eval_set: EvalSet, timeout_s: float) -> tuple[str, bool]:
    """What is found, as text, and whether the reward agrees with the file.

    Args:
        eval_set: With the name of a standard set.
        timeout_s: Deadline of the grading of an answer, unless the set's own is later.

    Raises:
        ValueError: The file has another form than the set's.
    """
    from slime_like.rewards.grader import Grader

    assert eval_set.set is not None
    standard = standard_sets.get(eval_set.set)
    require_library(standard.reward)
    accepts = answer_check(standard.reward, None)
    source = open_standard(
        eval_set,
        check=lambda row: accepts(row["label"], row["metadata"]),
        flag=SETS_FLAG,
    )
    rows = source.rows(range(len(source)))
    solutions = [row["solution"] for row in rows]
    lines = [f"{eval_set.name}: {len(rows)} rows of {source.name}, reward {standard.reward}"]
    lines += [*source.notes, "first prompt:", _indented(rows[0]["prompt"])]
    given = [i for i, solution in enumerate(solutions) if solution is not None]
    answers = [*((i, solutions[i]) for i in given), *((i, "") for i in range(len(rows)))]
    samples = [_sample(k, rows[i], str(text)) for k, (i, text) in enumerate(answers)]
    deadline = max(timeout_s, standard.rm_timeout_s)
    with Grader(rm_type=standard.reward, rm_timeout_s=deadline) as grader:
        scores = [sample.reward for sample in grader.grade(samples)]
    wrong = [i for i, score in zip(given, scores) if score != 1]
    passed = [i for i, score in enumerate(scores[len(given) :]) if score != 0]
    if given:
        lines.append(f"{len(given) - len(wrong)} of {len(given)} answers of the file are accepted")
    else:
        lines.append("the file has no answers to grade")
    lines += [f"  not accepted: {source.where(i)}" for i in wrong[:_SHOWN]]
    lines += [f"  an empty answer is not scored 0: {source.where(i)}" for i in passed[:_SHOWN]]
    return "\n".join(lines), not wrong and not passed


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def _sample(number: int, row: dict[str, object], response: str) -> Sample:
    import torch

    from slime_like.types import Sample

    metadata = row["metadata"]
    assert isinstance(metadata, dict)
    return Sample(
        group_id=number,
        sample_id=number,
        tokens=torch.zeros(1, dtype=torch.int64),
        response_length=1,
        loss_mask=torch.ones(1, dtype=torch.bool),
        response=response,
        label=row["label"],
        metadata=metadata,
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "sets", nargs="*", metavar="NAME[=PATH]", help="as for --eval-sets; none: list all"
    )
    result.add_argument(
        "--rm-timeout-s", type=float, default=60.0, help="deadline of an answer (default 60)"
    )
    return result


def main() -> int:
    args = parser().parse_args()

    def body() -> int:
        on_the_cpu()
        if not args.sets:
            print(listing())
            return 0
        return _check_all(args.sets, args.rm_timeout_s)

    return exit_status(body)


def _check_all(given: Sequence[str], timeout_s: float) -> int:
    found, problems = standard_eval_sets(EvalConfig(eval_sets=list(given)))
    if problems:
        raise UsageError("; ".join(f"{each.value}: {each.message}" for each in problems))
    agrees = True
    for eval_set in found:
        text, good = check(eval_set, timeout_s)
        print(text)
        agrees = agrees and good
    return 0 if agrees else DAMAGE


if __name__ == "__main__":
    raise SystemExit(main())
