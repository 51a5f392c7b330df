"""Problems of mathematics: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), MATH-500 (500 problems of
Hendrycks et al. 2021, arXiv 2103.03874, chosen by Lightman et al. 2023, arXiv 2305.20050), and the
American Invitational Mathematics Examination of a year."""

from __future__ import annotations

from slime_like.rewards.gsm8k import label_number, last_boxed
from slime_like.standard_sets.base import (
    NotThisSet,
    Problem,
    Row,
    StandardSet,
    column,
    standard_sets,
)

_BOXED = "{{ problem }}\n\nThink step by step, and write the final answer in \\boxed{}."
_MARKED = (
    "{{ question }}\n\nThink step by step, and end with a line that has the final number alone, "
    "after four number signs: #### 42"
)


def gsm8k(row: Row) -> Problem:
    """A row with a question, and a worked answer that ends with ``#### number``."""
    question, answer = column(row, "question"), column(row, "answer")
    if "####" not in answer or label_number(answer) is None:
        raise NotThisSet(f"'answer' has no number after '####': {answer[-60:]!r}")
    return Problem({"question": question}, answer, solution=answer)


def math_500(row: Row) -> Problem:
    """A row with a problem and its final answer."""
    answer = column(row, "answer")
    return Problem({"problem": column(row, "problem")}, answer, solution=f"\\boxed{{{answer}}}")


def aime(row: Row) -> Problem:
    """A row with a problem and its number, or a solution that ends with the number in a box."""
    problem = column(row, "problem", "Problem", "question")
    answer = None
    if any(row.get(name) is not None for name in ("answer", "Answer")):
        answer = str(column(row, "answer", "Answer", kind=(str, int)))
    else:
        answer = last_boxed(column(row, "solution", "Solution"))
    if answer is None or not answer.strip():
        raise NotThisSet("has neither an 'answer' nor a 'solution' with a \\boxed{} number")
    answer = answer.strip()
    answer = str(int(answer)) if answer.isascii() and answer.isdigit() else answer  # 025 is 25
    return Problem({"problem": problem}, answer, solution=f"\\boxed{{{answer}}}")


standard_sets.add(
    "gsm8k",
    StandardSet(
        "word problems of grade school; 1319",
        gsm8k,
        columns=("question", "answer"),
        names=("question",),
        template=_MARKED,
        reward="gsm8k",
        files=("main/test-*.parquet", "test-*.parquet", "test.jsonl"),
        hub=("openai/gsm8k",),
    ),
)
standard_sets.add(
    "math-500",
    StandardSet(
        "competition problems; 500",
        math_500,
        columns=("problem", "answer"),
        names=("problem",),
        template=_BOXED,
        reward="math",
        files=("test.jsonl", "data/test-*.parquet", "test-*.parquet"),
        hub=("HuggingFaceH4/MATH-500",),
    ),
)
for _year, _hub in (
    ("2024", ("HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024", "math-ai/aime24")),
    ("2025", ("math-ai/aime25", "opencompass/AIME2025", "yentinglin/aime_2025")),
):
    standard_sets.add(
        f"aime-{_year}",
        StandardSet(
            f"both examinations of {_year}; 30 problems",
            aime,
            columns=(
                *("problem", "Problem", "question"),
                *("answer", "Answer", "solution", "Solution"),
            ),
            names=("problem",),
            template=_BOXED,
            reward="math",
            files=("data/*.parquet", "*.parquet", "*/*.parquet", "*.jsonl"),
            parts=True,
            hub=_hub,
        ),
    )
