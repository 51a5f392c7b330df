"""SGLang's parsers of calls, in SGLang's own environment: what tests/unit/agents/test_answer_parsers.py does where
SGLang is in the trainer's."""

from __future__ import annotations

import json
import subprocess

from tests.e2e.programs import ROOT
from tests.sglang.conftest import PYTHON
from tests.unit.agents.test_answer_parsers import SGLANG_ANSWERS, TOOLS, sglang_case

PROGRAM = """
import json, sys
from slime_like.agents.answer_parsers import parse_answer
cases, tools = json.load(sys.stdin)
for name, text in cases:
    found = parse_answer(text, "sglang:" + name, tokenizer=None, prefix="", tools=tools)
    print("read", json.dumps([name, found.calls, found.errors]))
"""


def test_sglang_reads_its_families() -> None:
    cases = [(name, sglang_case(name)[0]) for name in SGLANG_ANSWERS]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        input=json.dumps([cases, TOOLS]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("read ")]
    expected = [[name, [list(call) for call in sglang_case(name)[1]], 0] for name in SGLANG_ANSWERS]
    assert [json.loads(line) for line in lines] == expected
