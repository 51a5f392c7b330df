"""Which mechanism blocks each attempt to escape the sandbox, and what succeeds if a mechanism is
missing.

    python benchmarks/escape_table.py [--json out.json] [--write-docs]

The attempts are those of the tests (`tests/unit/rewards/sandbox_attempts.py`). They run outside,
under each mechanism alone, in the sandbox, and in the sandbox of a host that lacks a mechanism;
where the sandbox refuses to start, also under what is left, to show why it refuses. Everything in
them is harmless. --write-docs puts the tables into docs/*/faults.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402
from slime_like.rewards import confinement  # noqa: E402
from tests.unit.rewards.sandbox_surroundings import ATTEMPTS, outcomes, surroundings  # noqa: E402

NAMESPACES = "namespaces"
LANDLOCK = "landlock"
SCOPES = "landlock_scopes"
SECCOMP = "seccomp"
LIMITS = "limits"
ALONE = {  # column of the table: mechanisms
    "namespaces": (NAMESPACES,),
    "Landlock": (LANDLOCK, SCOPES),
    "seccomp": (SECCOMP,),
    "limits": (LIMITS,),
}
MISSING: tuple[tuple[str, ...], ...] = (
    (),
    (NAMESPACES,),
    (LANDLOCK, SCOPES),
    (SCOPES,),
    (SECCOMP,),
    (NAMESPACES, LANDLOCK, SCOPES),
)
BEGIN = "<!-- escapes: made by benchmarks/escape_table.py -->\n"
END = "<!-- escapes: end -->"
UNTRIED = {"vfork"}  # unless a filter blocks it, the child would continue on the parent's stack
WORDS = {  # language -> (head of the first table, head of the second, words of the second)
    "en": (
        "attempt | namespaces | Landlock | seccomp | limits, no capabilities",
        "missing | the sandbox | attempts that get through",
        {
            "yes": "refuses",
            "nothing": "nothing",
            "runs": "runs",
            "stops": "refuses to start",
            "none": "none of {total}",
            "some": "{count} of {total}: {names}",
            "if": "under what is left, {count} of {total}: {names}",
        },
    ),
    "zh": (
        "尝试 | 命名空间 | Landlock | seccomp | 资源限制、无 capability",
        "缺少 | 沙箱 | 得逞的尝试",
        {
            "yes": "拒绝",
            "nothing": "无",
            "runs": "运行",
            "stops": "拒绝启动",
            "none": "{total} 个中 0 个",
            "some": "{total} 个中 {count} 个：{names}",
            "if": "仅凭余下的机制，{total} 个中 {count} 个：{names}",
        },
    ),
}
_UNDER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from slime_like.rewards import confinement as c, seccomp
layers, script = set(json.loads(sys.argv[2])), sys.stdin.read()
c.assume(dict.fromkeys(c.LAYERS.keys() - layers, "left out"))
paths = c.readable_paths(packages=False)
if "namespaces" in layers:
    c.own_namespaces(paths)
if layers - {"namespaces"}:
    c._prctl(c._PR_SET_NO_NEW_PRIVS, 1)
if "landlock" in layers:
    rights = dict.fromkeys(paths, c._READ_FILE | c._READ_DIR)
    c._landlock(rights, scopes="landlock_scopes" in layers)
if "limits" in layers:
    c._drop_capabilities()
    c._prctl(c._PR_SET_DUMPABLE, 0)
    c.limit(memory=2**30, open_files=64, cpu_s=60)
if "seccomp" in layers:
    seccomp.install(fork=False)
exec(compile(script, "attempts.py", "exec"), {"__name__": "__main__"})
"""
_SANDBOX = """
import json, sys
sys.path.insert(0, sys.argv[1])
from slime_like.rewards import sandbox
try:
    found = sandbox.run(sys.stdin.read(), limits=sandbox.SandboxLimits(wall_s=60, cpu_s=60))
except sandbox.SandboxError as error:
    print(json.dumps({"refused": str(error)}))
else:
    print(json.dumps({"status": found.status, "stdout": found.stdout}))
"""


@dataclass(frozen=True)
class Lacking:
    """A host without some mechanisms."""

    missing: tuple[str, ...]
    refusal: str | None  # message of the sandbox if it refuses to start
    # attempts that succeed in the sandbox, or under the remaining mechanisms
    through: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """What refuses each attempt on a complete host."""

    refusing: dict[str, tuple[str, ...]]  # attempt -> columns of `ALONE` that block it
    outside: tuple[str, ...]  # attempts that this host or user blocks without any mechanism
    lacking: tuple[Lacking, ...]


def under(layers: Sequence[str]) -> dict[str, str]:
    """Outcomes of all attempts under these mechanisms only."""
    filtered = SECCOMP in layers
    found = outcomes(_python(_UNDER, json.dumps(list(layers)), outside=not filtered))
    return found if filtered else {**found, **dict.fromkeys(UNTRIED, "not tried")}


def in_sandbox(missing: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """(refusal of the sandbox, outcomes inside it) on a host without these mechanisms."""
    answer = json.loads(_python(_SANDBOX, outside=False, missing=missing))
    if "refused" in answer:
        return answer["refused"], {}
    assert answer["status"] == "ok", answer
    return None, outcomes(answer["stdout"])


def _python(program: str, *arguments: str, outside: bool, missing: Sequence[str] = ()) -> str:
    """Output of a Python program that is given the attempts and separate surroundings."""
    with tempfile.TemporaryDirectory() as name, surroundings(Path(name)) as lines:
        done = subprocess.run(
            [sys.executable, "-c", program, str(ROOT), *arguments],
            input=f"OUTSIDE = {outside}\n{lines}{ATTEMPTS}",
            env={**os.environ, confinement.DISABLE: ",".join(missing)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def through(found: dict[str, str], outside: Sequence[str]) -> tuple[str, ...]:
    """Attempts that succeeded, or reached the kernel's checks of their arguments."""
    return tuple(
        name
        for name, how in found.items()
        if how not in ("refused", "not tried") and name not in outside
    )


def measure() -> Table:
    free = under(())
    outside = tuple(name for name, how in free.items() if how == "refused")
    alone = {column: under(layers) for column, layers in ALONE.items()}
    refusing = {
        name: tuple(column for column, found in alone.items() if found[name] == "refused")
        for name in free
    }
    lacking = []
    for missing in MISSING:
        refusal, found = in_sandbox(missing)
        if refusal is not None:
            left = [name for name in confinement.LAYERS if name not in missing]
            found = under([*left, LIMITS])
        got = through(found, outside if refusal else ())
        lacking.append(Lacking(missing, refusal, got))
    return Table(refusing, outside, tuple(lacking))


def tables(table: Table, language: str) -> str:
    """Both tables in Markdown."""
    first, second, words = WORDS[language]
    lines = [f"| {second} |", "|---|---|---|"]
    for row in table.lacking:
        missing = ", ".join(row.missing) or words["nothing"]
        names = "; ".join(row.through)
        kind = "none" if not row.through else "some" if row.refusal is None else "if"
        count = words[kind].format(count=len(row.through), total=len(table.refusing), names=names)
        lines.append(f"| {missing} | {words['stops' if row.refusal else 'runs']} | {count} |")
    lines += ["", f"| {first} |", "|---|---|---|---|---|"]
    for name, refusing in table.refusing.items():
        cells = [words["yes"] if column in refusing else "" for column in ALONE]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_docs(table: Table) -> None:
    for language in WORDS:
        path = ROOT / "docs" / language / "faults.md"
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        path.write_text(
            before + BEGIN + tables(table, language) + END + rest.split(END)[1], encoding="utf-8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--write-docs", action="store_true", help="into docs/*/faults.md")
    options = parser.parse_args()
    if lacking := confinement.missing():
        sys.exit(f"this host lacks {', '.join(lacking)}; the tables need all mechanisms")
    table = measure()
    print(tables(table, "en"), end="")
    print(f"refused outside too, by this host or user: {', '.join(table.outside) or 'none'}")
    for row in table.lacking:
        if row.refusal:
            print(f"without {', '.join(row.missing)}: {row.refusal}")
    write_json(options.json, asdict(table))
    if options.write_docs:
        write_docs(table)


if __name__ == "__main__":
    main()
