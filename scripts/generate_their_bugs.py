"""Write docs/en/their_bugs.md and docs/zh/their_bugs.md from docs/their_bugs.yaml:
python scripts/generate_their_bugs.py.

tests/unit/scripts/test_generate_their_bugs.py checks that they are up to date."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "their_bugs.yaml"
SUITES = ("slow", "extended")  # pytest marks, slowest first; unmarked tests are in make test
TEXTS = {
    "en": {
        "title": "Their bug, our test",
        "lead": "{bugs} bugs that users reported in public to other trainers and inference"
        " engines, with tests of this project that would fail on them. The opening post of every"
        " listed thread was read. Many of the bugs have been fixed since: the list says what a"
        " trainer has to be tested for, not what is wrong with these projects. It is made from"
        " `docs/their_bugs.yaml` by `python scripts/generate_their_bugs.py`; `make test` checks"
        " that every test exists and runs in continuous integration.",
        "head": "| report | what happened | test | runs in |",
        "make test": "`make test`",
        "extended": "`make test-extended`",
        "slow": "`make test-slow`",
        "counts": "{tests} distinct tests: {each}.",
    },
    "zh": {
        "title": "别人的 bug，我们的测试",
        "lead": "用户向其他训练框架和推理引擎公开报告的 {bugs} 个 bug，"
        "以及本项目中会因此失败的测试。"
        "列出的每个帖子都读过首帖。其中许多 bug 已经修复：这张表说明训练框架必须测试什么，"
        "而不是这些项目有什么问题。"
        "本页由 `python scripts/generate_their_bugs.py` 从 `docs/their_bugs.yaml` 生成；"
        "`make test` 检查每个测试都存在，并在持续集成中运行。",
        "head": "| 报告 | 发生了什么 | 测试 | 运行于 |",
        "make test": "`make test`",
        "extended": "`make test-extended`",
        "slow": "`make test-slow`",
        "counts": "共 {tests} 个不同的测试：{each}。",
    },
}


@dataclass(frozen=True, slots=True)
class NamedTest:
    """A test function."""

    path: str  # relative to tests/
    name: str
    suite: str  # "make test", "extended" or "slow"


def read() -> list[dict[str, Any]]:
    """Read the groups of the data file, each with a title and a list of bugs."""
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))


def _marks(nodes: list[ast.expr]) -> set[str]:
    return {
        part.attr
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and part.attr in SUITES
    }


@cache
def functions_of(path: str) -> dict[str, str]:
    """Test functions of a file in tests/, with their suites. A mark on a single case of a
    parametrised test does not count."""
    body = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8")).body
    of_all = _marks(
        [n.value for n in body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    )
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            own = [d for d in node.decorator_list if "parametrize" not in ast.unparse(d)]
            marks = of_all | _marks(own)
            found[node.name] = next((s for s in SUITES if s in marks), "make test")
    return found


def named_by(bug: dict[str, Any]) -> Iterator[NamedTest]:
    """The tests that a bug names. Raises ValueError for one that does not exist."""
    for entry in bug["tests"]:
        path, names = entry.split(": ")
        there = functions_of(path)
        for name in (f"test_{n}" for n in names.split()):
            if name not in there:
                raise ValueError(f"docs/their_bugs.yaml: {bug['at']}: {path} has no {name}")
            yield NamedTest(path, name, there[name])


def link_of(at: str) -> str:
    """The URL of owner/repository#number. GitHub redirects it for pull requests."""
    repository, number = at.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def _row(bug: dict[str, Any], language: str) -> str:
    texts = TEXTS[language]
    tests = list(named_by(bug))
    links = "<br>".join(f"[`{t.name}`](../../tests/{t.path})" for t in tests)
    suites = ", ".join(
        texts[s] for s in ("make test", *SUITES[::-1]) if s in {t.suite for t in tests}
    )
    return f"| [{bug['at']}]({link_of(bug['at'])}) | {bug[language]} | {links} | {suites} |"


def page(language: str) -> str:
    """Text of the page. language: "en" or "zh"."""
    texts = TEXTS[language]
    groups = read()
    bugs = [bug for group in groups for bug in group["bugs"]]
    tests = {test for bug in bugs for test in named_by(bug)}
    each = ", ".join(
        f"{sum(t.suite == suite for t in tests)} {texts[suite]}"
        for suite in ("make test", *SUITES[::-1])
    )
    lines = [f"# {texts['title']}", "", texts["lead"].format(bugs=len(bugs)), ""]
    lines += [texts["counts"].format(tests=len(tests), each=each), ""]
    for group in groups:
        lines += [f"## {group['title'][language]}", "", texts["head"], "|---|---|---|---|"]
        lines += [_row(bug, language) for bug in group["bugs"]] + [""]
    return "\n".join(lines)


def main() -> None:
    """Write both pages."""
    for language in TEXTS:
        path = ROOT / "docs" / language / "their_bugs.md"
        path.write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()
