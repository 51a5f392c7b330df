"""The code reward's text work: outputs as numbers, and imports from __future__."""

from __future__ import annotations

import pytest

from slime_like.rewards.code import _after, _same_output, program_of


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


@pytest.mark.parametrize(
    "response",
    [
        "Run it:\n```bash\npython a.py\n```\nthen\n```python\nprint(3)\n```",
        "```text\n3\n```\nSolution:\n```python\nprint(3)\n```\nOutput:\n```text\n3\n```",
        'Not ```print(1)```, but\n```Python title="a.py"\nprint(3)\n```',
        "1. So:\n   ```python\n   print(3)\n   ```\n2. Done",
        "It is ```py\nprint(3)\n``` and not ```cpp\nint i;\n```",
        "```\nprint(1)\n```\n``` python3\nprint(3)\n```",
    ],
)
def test_the_program_is_the_last_block_of_python(response: str) -> None:
    assert program_of(response) == "print(3)\n"


@pytest.mark.parametrize("response", ["print(3)", "```cpp\nint i;\n```", "```python\nprint(3)"])
def test_without_such_a_block_the_response_is_the_program(response: str) -> None:
    assert program_of(response) == response


@pytest.mark.parametrize("program", ["print(1)\n", "from __future__ import annotations"])
def test_statements_before_a_program_need_no_end_of_line(program: str) -> None:
    joined = _after("import math", program)
    compile(joined, "program", "exec")
    assert "import math" in joined.splitlines()
