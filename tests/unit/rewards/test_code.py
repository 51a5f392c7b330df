"""The code reward's text work: outputs as numbers, and imports from __future__."""

from __future__ import annotations

import pytest

from slime_like.rewards.code import _after, _same_output


@pytest.mark.parametrize(
    ("found", "same"),
    [("1.50", True), ("15e-1", True), ("1.51", False), ("sNaN", False), ("nan", False), ("x", False)],
)  # fmt: skip
def test_outputs_as_numbers(found: str, same: bool) -> None:
    assert _same_output(found, "1.5", True) is same
    assert _same_output(f"2 {found}", "2 1.5", True) is same
    assert _same_output(found, found, True)


@pytest.mark.parametrize(
    "imports",
    [
        "from __future__ import annotations\n",
        "from  __future__ import annotations, division  # both\n",
        "from __future__ import (\n  annotations,\n)\n",
        "from __future__ import(annotations)\n",
        "from __future__ import annotations, \\\n  division\n",
        "from __future__ import annotations\nfrom __future__ import division\n",
    ],
)
def test_statements_go_behind_imports_from_the_future(imports: str) -> None:
    program = _after("y = 1\n", imports + "x = y\n")
    assert program == imports + "y = 1\nx = y\n"
    values: dict[str, int] = {}
    exec(compile(program, "program", "exec", dont_inherit=True), values)
    assert values["x"] == 1
