#!/usr/bin/env python
"""Write the table of slime's launch scripts into the page "Coming from slime", in both languages:
`tests/unit/test_slime_scripts.py` parses them all and proves it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.slime_scripts import SlimeScript, slime_scripts  # noqa: E402

PAGES = (ROOT / "docs/en/coming_from_slime.md", ROOT / "docs/zh/coming_from_slime.md")
BEGIN, END = "<!-- table of scripts: generated -->", "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Feature:
    """What a script is refused for. message: a part of the error; en, zh: of the page."""

    message: str
    en: str
    zh: str


GDN = Feature(
    "gated delta net",
    "gated delta net layers (linear attention)",
    "门控 delta 网络层（线性注意力）",
)
DSA = Feature(
    "sparse attention", "sparse attention with an indexer (DSA)", "带索引器的稀疏注意力（DSA）"
)
TEACHER = Feature("--opd-teacher-load", "a teacher in Megatron's format", "Megatron 格式的教师模型")
MTP = Feature(
    "multi-token prediction", "training of multi-token prediction heads", "训练多 token 预测头"
)
NORMS = Feature(
    "four norms in a layer",
    "four norms in a layer, interleaved partial rotary embeddings",
    "每层四个归一化与交错的部分旋转嵌入",
)
ROTARY = Feature("partial rotary", "partial rotary embeddings", "部分旋转嵌入")
ALL_HEADS = Feature(
    "norms over all heads", "query and key norms over all heads at once", "跨所有头的查询与键归一化"
)
FP8 = Feature("fp8 and fp4 training", "training in fp8", "fp8 训练")
IFBENCH = Feature("ifbench", "the reward ifbench in its evaluation sets", "评测集使用奖励 ifbench")
UNEVEN = Feature(
    "does not divide the 47 layers",
    "47 layers on 2 pipeline stages without `--decoder-last-pipeline-num-layers`, as in Megatron-LM",
    "47 层分到 2 个流水线阶段而没有 `--decoder-last-pipeline-num-layers`，Megatron-LM 也拒绝",
)
REFUSED: Mapping[str, Feature] = {
    "examples/coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes.sh": GDN,
    "examples/fully_async/run-qwen3.5-9B-fully_async.sh": GDN,
    "examples/geo3k_vlm/run_geo3k_qwen35.sh": GDN,
    "examples/eval_multi_task/multi_task.sh": IFBENCH,
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": FP8,
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": UNEVEN,
    "examples/on_policy_distillation/run-qwen3-8B-opd-megatron.sh": TEACHER,
    "scripts/run-glm4-9B.sh": NORMS,
    "scripts/run-glm4.7-30B-A3B.sh": MTP,
    "scripts/run-glm4.7-355B-A32B.sh": ROTARY,
    "scripts/run-glm5-744B-A40B.sh": DSA,
    "scripts/run-glm5.2-744B-A40B.sh": DSA,
    "scripts/run-mimo-7B-rl-eagle.sh": MTP,
    "scripts/run-minimax-m2.sh": ALL_HEADS,
    "scripts/run-qwen3-next-80B-A3B.sh": GDN,
    "scripts/run-qwen3.5-27B.sh": GDN,
    "scripts/run-qwen3.5-35B-A3B-sft.sh": GDN,
}


def table(page: Path) -> str:
    """As Markdown, in the page's language."""
    chinese = "/zh/" in page.as_posix()
    scripts = slime_scripts()
    taken = len(scripts) - len(REFUSED)
    head = "| 脚本 | 进程数 | 结果 |" if chinese else "| script | processes | result |"
    rows = [_row(script, chinese) for script in scripts.values()]
    total = (
        f"{len(scripts)} 个脚本中接受 {taken} 个。"
        if chinese
        else f"{taken} of {len(scripts)} scripts are taken."
    )
    return "\n".join([BEGIN, total, "", head, "|---|---|---|", *rows, END])


def _row(script: SlimeScript, chinese: bool) -> str:
    feature = REFUSED.get(script.name)
    if feature is None:
        result = "接受" if chinese else "taken"
    else:
        result = f"拒绝：{feature.zh}" if chinese else f"refused: {feature.en}"
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
