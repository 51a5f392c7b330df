#!/usr/bin/env python
"""Write the table of slime's launch scripts into the page "Coming from slime", in both languages:
`tests/unit/arguments/test_slime_launch.py` parses them all and proves it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.arguments.slime_scripts import SlimeScript, slime_scripts  # noqa: E402

PAGES = (ROOT / "docs/en/coming_from_slime.md", ROOT / "docs/zh/coming_from_slime.md")
BEGIN = "<!-- table of scripts: generated -->"
END = "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Feature:
    """Why a script is rejected."""

    message: str  # part of the error message
    en: str  # text on the page
    zh: str  # text on the page


PREFILL = Feature(
    "prefill servers",
    "servers that only prefill (`--prefill-num-servers`); accepted without that flag",
    "只做预填充的服务器（`--prefill-num-servers`）；去掉该参数即接受",
)
FP8 = Feature("fp8 and fp4 training", "training in fp8", "fp8 训练")
IFBENCH = Feature(
    "ifbench requires ifbench",
    "the reward ifbench needs the package of the same name; accepted if it is installed",
    "奖励 ifbench 需要同名的包；装上后即接受",
)
UNEVEN = Feature(
    "divisor of 47",
    "47 layers on 2 pipeline stages without `--decoder-last-pipeline-num-layers`, as in "
    "Megatron-LM",
    "47 层分到 2 个流水线阶段而没有 `--decoder-last-pipeline-num-layers`，Megatron-LM 也拒绝",
)
CROWDED = Feature(
    "does not divide the 8 processes",
    "8 expert-parallel ranks for each of 2 pipeline stages on 8 processes; Megatron-LM rejects it "
    "too; accepted with `--expert-model-parallel-size 4`",
    "2 个流水线阶段各需 8 个专家并行进程而总共只有 8 个，Megatron-LM 也拒绝；"
    "`--expert-model-parallel-size 4` 时接受",
)
REFUSED: Mapping[str, Feature] = {
    "examples/eval_multi_task/multi_task.sh": IFBENCH,
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": FP8,
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": UNEVEN,
    "scripts/run-glm4.7-30B-A3B.sh": CROWDED,
    "scripts/run-glm5-744B-A40B.sh": PREFILL,
}


def table(page: Path) -> str:
    """The table in Markdown, in the language of the page."""
    chinese = "/zh/" in page.as_posix()
    scripts = slime_scripts()
    taken = len(scripts) - len(REFUSED)
    head = "| 脚本 | 进程数 | 结果 |" if chinese else "| script | processes | result |"
    rows = [_row(script, chinese) for script in scripts.values()]
    total = (
        f"{len(scripts)} 个脚本中接受 {taken} 个。"
        if chinese
        else f"{taken} of {len(scripts)} scripts are accepted."
    )
    return "\n".join([BEGIN, total, "", head, "|---|---|---|", *rows, END])


def _row(script: SlimeScript, chinese: bool) -> str:
    feature = REFUSED.get(script.name)
    if feature is None:
        result = "接受" if chinese else "accepted"
    else:
        result = f"拒绝：{feature.zh}" if chinese else f"rejected: {feature.en}"
    return f"| `{script.name}` | {script.world_size} | {result} |"


def main() -> int:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        page.write_text(
            re.sub(pattern, table(page).replace("\\", "\\\\"), text, flags=re.DOTALL), "utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
