"""Tests, files and functions that commands, documents and comments name are there, and tests/unit has the folders of
the code."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

COMMANDS = [ROOT / name for name in (".ci/run", "Makefile", "CONTRIBUTING.md")]
DOCUMENTS = [ROOT / "README.md", ROOT / "README_zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("slime_like", "arguments", "megatron_patches", "scripts", "benchmarks", "examples", "tests")
_FILE_OF_TESTS = re.compile(r"(?<![\w/.])tests/[\w/]+\.\w+")
LIBRARY = ROOT / "slime_like"
LIBRARY_FOLDERS = ("slime_like", "arguments", "megatron_patches")
OUTSIDE_THE_LIBRARY = ("arguments", "megatron_patches", "benchmarks", "examples", "scripts")


def missing_in(path: Path) -> list[str]:
    """Files of tests that a file names, and that are not there."""
    named = _FILE_OF_TESTS.findall(path.read_text(encoding="utf-8"))
    return sorted({file for file in named if not (ROOT / file).is_file()})


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_name_tests_that_are_there(path: Path) -> None:
    assert _FILE_OF_TESTS.search(path.read_text(encoding="utf-8"))
    assert missing_in(path) == []


def test_documents_and_code_name_tests_that_are_there() -> None:
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = {str(path.relative_to(ROOT)): missing_in(path) for path in (*DOCUMENTS, *code)}
    assert {path: files for path, files in missing.items() if files} == {}


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    gone = "tests/" + "unit/test_gone.py"
    (tmp_path / "run").write_text(f"pytest {gone} tests/unit/test_named_tests.py\n")
    assert missing_in(tmp_path / "run") == [gone]


def test_unit_tests_are_in_the_folders_of_the_code() -> None:
    """tests/unit/losses is for slime_like/losses, tests/unit/arguments/rules for arguments/rules."""
    unit = ROOT / "tests" / "unit"
    for folder in sorted({path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}):
        code = ROOT if folder.parts and folder.parts[0] in OUTSIDE_THE_LIBRARY else LIBRARY
        assert (code / folder).is_dir(), f"tests/unit/{folder} is for no folder of the code"


# Files of users and of other projects that comments and documents name
OF_USERS = re.compile(
    r"(path/to/)?file\.py|my\w*(/\w+)?\.py|make_my_data\.py|test\.py|program\.py|test_reward\.py"
)
OF_OTHERS = {
    "json.py",  # SGLang's, in /usr/bin
    "megatron/core/optimizer/clip_grads.py",
    "megatron/core/transformer/moe/token_dispatcher.py",
    "p2p_communication.py",
    "package_info.py",
    "state_capturer/indexer_topk.py",
    "state_capturer/routed_experts.py",
    "train_async.py",
    "distributed/distributed_data_parallel_config.py",
    "model_parallel_config.py",
    "optimizer/optimizer_config.py",
    "router_args.py",
    "server_args.py",
    "transformer/transformer_config.py",
    "version.py",
}
_FILE = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.py\b")
_MODULE = re.compile(r"(?<![\w./-])(?:slime_like|arguments|megatron_patches)(?:\.\w+)+")
_QUOTED = re.compile(r"`([^`\n]+)`")
_ATTRIBUTE = re.compile(r"(?<![\w./-])([a-z_]\w*)\.(?!py\b|txt\b|yaml\b|json)(\w+)")
ABOUT_THE_CODE = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def sources() -> dict[Path, str]:
    """Text of every file of Python, by its path from the root."""
    files = [
        ROOT / "train.py",
        *(path for folder in CODE for path in (ROOT / folder).rglob("*.py")),
    ]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}


@cache
def tails() -> dict[str, list[Path]]:
    """``megatron/moe.py`` -> the files whose paths end so."""
    result = defaultdict(list)
    for path in sources():
        for start in range(len(path.parts)):
            result["/".join(path.parts[start:])].append(path)
    return result


def comments_of(path: Path) -> str:
    """Comments and docstrings of a file of Python; a document as it is, without code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""')))
    )


def files_that_are_gone(text: str) -> Iterator[str]:
    for file in _FILE.findall(text):
        if file not in tails() and file not in OF_OTHERS and not OF_USERS.fullmatch(file):
            yield file


def names_that_are_gone(text: str) -> Iterator[str]:
    """Modules by their full names, and `module.name` where the module is one of the library and has no such name."""
    for module in _MODULE.findall(text):
        parts = module.split(".")
        depth = len(parts)
        while depth and not (ROOT.joinpath(*parts[:depth])).is_dir():
            depth -= 1
        inside = ROOT.joinpath(*parts[:depth])
        if depth < len(parts):
            file = inside / f"{parts[depth]}.py"
            name = parts[depth + 1] if depth + 1 < len(parts) else ""
            if not file.is_file():
                file = inside / "__init__.py"
                name = parts[depth]
            if not file.is_file() or not re.search(rf"\b{name}\b", file.read_text("utf-8")):
                yield module
    for quoted in _QUOTED.findall(text):
        for module, name in _ATTRIBUTE.findall(quoted):
            files = [p for p in tails().get(f"{module}.py", []) if p.parts[0] in LIBRARY_FOLDERS]
            if f"{module}/{name}.py" in tails():
                continue
            if files and not any(re.search(rf"\b{name}\b", sources()[p]) for p in files):
                yield f"{module}.{name}"


# Attributes of values, settings and modules of others that are named like one of our modules
OF_VALUES = {
    "config.normalization",
    "config.params_dtype",
    "slime.utils",
    "trainer.algorithm",
    "tree.group",
}


def gone_in(path: Path) -> list[str]:
    text = comments_of(path)
    if path.suffix == ".md" and path not in ABOUT_THE_CODE:  # guides name files that users write
        return sorted({file for file in files_that_are_gone(text) if "/" in file})
    names = set(files_that_are_gone(text)) | set(names_that_are_gone(text))
    return sorted(names - OF_VALUES)


def test_documents_and_comments_name_files_and_functions_that_are_there() -> None:
    library = [ROOT / path for path in sources() if path.parts[0] in LIBRARY_FOLDERS]
    gone = {
        str(path.relative_to(ROOT)): gone_in(path)
        for path in (*DOCUMENTS, *ABOUT_THE_CODE, *library)
    }
    assert {path: names for path, names in gone.items() if names} == {}


def test_a_module_or_a_function_that_is_gone_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        '"""See trainer/sampling_plane.py, losses/total.py, path/to/file.py, slime_like.losses.kl.kl_estimate,\n'
        'slime_like.rollout.step_plan, slime_like.losses.kl.no_such, `guards.check_finite`, `packing.pack_all`."""\n'
        "x = 'not_checked.py'  # weights/lost.py\n"
    )
    assert gone_in(page) == [
        "guards.check_finite",
        "slime_like.losses.kl.no_such",
        "slime_like.rollout.step_plan",
        "trainer/sampling_plane.py",
        "weights/lost.py",
    ]
