"""The page: hostile text stays text, and numbers that are not finite stay apart."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from slime_like.metrics.logger import MetricsLogger
from slime_like.report.page import json_in_html, page
from slime_like.report.read import curves, read_run
from slime_like.report.rollouts import read_samples
from tests.unit.report.runs import HOSTILE, write_run


def test_hostile_text_is_no_markup(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path))]
    text = page(runs, read_samples(runs, 100))
    assert HOSTILE not in text and "\\u003c/script\\u003e" in text
    assert "connect-src 'none'" in text
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL):
        json.loads(data)
    outside = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=\"?(https?:)?//", outside)
    assert json.loads(json_in_html({"a": HOSTILE + "\u2028"})) == {"a": HOSTILE + "\u2028"}


def test_curves_keep_what_is_not_finite_apart(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": 1.0, "b": 2.0})
        logger.log(2, {"a": math.nan})
        logger.log(3, {"a": -math.inf, "b": 0.1 + 0.2})
    found = curves(read_run(tmp_path))
    assert found["metrics"] == {"a": [1, None, None], "b": [2, None, 0.3]}
    assert found["bad"] == {"a": [2, 3]}
