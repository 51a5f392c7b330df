"""The documents name flags, files and headings that exist, say the same in both languages, and
nothing of the machine they were written on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from arguments.flag_registry import flag_table, normalise
from arguments.help import default_text
from arguments.parse import parse_args
from arguments.translate.names import ALIASES, IGNORED, NO_EFFECT, PRESETS, not_implemented
from slime_like.advantages import advantage_estimators
from slime_like.config import ConfigError
from slime_like.losses import LOSS_REDUCTIONS, policy_losses
from tests.paths import ROOT

ENGLISH, CHINESE = ROOT / "docs" / "en", ROOT / "docs" / "zh"
DOCUMENTS = [
    ROOT / n
    for n in ("README.md", "README_zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
] + sorted((ROOT / "docs").rglob("*.md"))
SCRIPTS = sorted(p for p in (ROOT / "scripts").rglob("*") if p.suffix in (".sh", ".sbatch"))
PAGES = sorted(ENGLISH.rglob("*.md"))
PAIRS = [
    (ROOT / "README.md", ROOT / "README_zh.md"),
    *((page, CHINESE / page.relative_to(ENGLISH)) for page in PAGES),
]
# Flags of other programs that the documents and scripts call
FOREIGN = {
    "pip": "--constraint --no-build-isolation --editable --quiet --upgrade --no-deps --requirement",
    "sky": "--env",
    "hf": "--local-dir --repo-type",
    "torchrun": "--no-python --nproc-per-node --nnodes --node-rank --master-addr --master-port --standalone"
    " --max-restarts --rdzv-backend --rdzv-endpoint",
    "slurm": "--nodes --gpus-per-node --ntasks-per-node --signal --job-name --output --kill-on-bad-exit --export --ntasks --relative --requeue --open-mode"
    " --batch --rdzv-conf --no-kill --nodelist --noheader --Node --format",
    "sglang.launch_server": "--model-path --host --port --tp-size --device --dtype --attention-backend --enable-return-routed-experts --enable-return-indexer-topk --enable-deterministic-inference --sampling-mask-max-tokens --enable-lora --lora-strict-loading --max-lora-rank",
    "tensorboard": "--logdir",
    "lm_eval": "--model_args --tasks --include_path --batch_size --model --device",
    "examples/tinker": "--model --base-url --demo --learning-rate --log-path --max-steps-off-policy --start-from --stop-after",
    "of a user's module": "--my-weight --spo-eps",
    "passed on to SGLang": "--sglang-mem-fraction-static --sglang-enable-dp-attention --sglang-dp-size --sglang-enable-deterministic-inference --sglang-rl-on-policy-target"
    " --sglang-debug-tensor-dump-output-folder --debug-tensor-dump-output-folder",
    "sglang.launch_server, vllm serve": "--is-embedding --runner",
    "vllm serve": "--logprobs-mode --worker-extension-cls --enable-scale-out --max-model-len",
    "passed on to vLLM": "--vllm-gpu-memory-utilization",
}
OTHERS = {flag for flags in FOREIGN.values() for flag in flags.split()}
WRONG_ON_PURPOSE = {"--polcy-loss-type"}
_FLAG = re.compile(r"(?<![\w/-])--[a-z][\w-]*")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def flags_of_our_scripts() -> set[str]:
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in (
            "scripts",
            "benchmarks",
            "slime_like/metrics",
            "slime_like/cli",
            "slime_like/report",
            "examples/agents",
        )
        for path in (ROOT / folder).rglob("*.py")
    )
    text += (ROOT / "slime_like/doctor.py").read_text(encoding="utf-8")
    return set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text)) | set(
        re.findall(r"\"(--[\w-]+)\" in sys\.argv", text)
    )


def is_usable(flag: str) -> bool:
    table = flag_table()
    flag = normalise(ALIASES.get(flag, flag))
    found = table.spellings.get(flag)
    return (found is not None and not found.flag.rejection) or flag in {
        *PRESETS,
        *NO_EFFECT,
        *IGNORED,
        "--help",
        "--version",
    }


def is_known(flag: str) -> bool:
    return (
        is_usable(flag)
        or flag in flag_table().spellings
        or not_implemented(flag) is not None
        or flag in WRONG_ON_PURPOSE
    )


def headings(path: Path) -> list[tuple[str, str]]:
    """(#s, title) of every heading outside code."""
    return _HEADING.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name != "flags.md"], ids=name)
def test_flags_in_documents_exist(path: Path) -> None:
    flags = set(_FLAG.findall(path.read_text(encoding="utf-8")))
    ours = {f for f in flags - OTHERS - flags_of_our_scripts() if not f.endswith(("-x", "-"))}
    assert not sorted(f for f in ours if not is_known(f))


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_flags_in_scripts_can_be_used(path: Path) -> None:
    flags = set(_FLAG.findall(path.read_text(encoding="utf-8")))
    assert flags, "scripts call programs with flags"
    assert not sorted(f for f in flags - OTHERS - flags_of_our_scripts() if not is_usable(f))


def test_the_check_of_flags_sees_a_wrong_one() -> None:
    assert (
        is_usable("--sapo-tau-pos")
        and not is_usable("--use-tis-never")
        and not is_known("--sapo-tau-poss")
    )


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def broken_links(path: Path) -> Iterator[str]:
    for target in _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (
            anchor and anchor not in {slug(title) for _, title in headings(there)}
        ):
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    assert not list(broken_links(path))


def test_both_languages_have_the_same_pages() -> None:
    assert [p.relative_to(ENGLISH) for p in PAGES] == [
        p.relative_to(CHINESE) for p in sorted(CHINESE.rglob("*.md"))
    ]


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda path: name(path))
def test_both_languages_say_the_same(english: Path, chinese: Path) -> None:
    """As far as a program can tell: headings, flags, and the code but for its comments."""
    assert [level for level, _ in headings(english)] == [level for level, _ in headings(chinese)]
    texts = [path.read_text(encoding="utf-8") for path in (english, chinese)]
    assert set(_FLAG.findall(texts[0])) == set(_FLAG.findall(texts[1]))
    code = [[re.sub(r"\s*#.*", "", block) for block in _FENCE.findall(text)] for text in texts]
    assert code[0] == code[1]


@pytest.mark.parametrize("folder", [ENGLISH, CHINESE], ids=name)
def test_every_page_is_linked_from_the_index(folder: Path) -> None:
    """Which is the navigation of the site, too, and linked from the README."""
    text = (folder / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    assert not sorted(
        p for p in pages - {"index.md"} if f"]({p})" not in text and f"]({p}#" not in text
    )
    readme = "README.md" if folder == ENGLISH else "README_zh.md"
    assert f"]({folder.relative_to(ROOT)}/index.md)" in (ROOT / readme).read_text(encoding="utf-8")


def test_every_page_of_a_folder_is_linked_from_its_index() -> None:
    indices = [index for language in (ENGLISH, CHINESE) for index in language.glob("*/index.md")]
    assert indices
    for index in indices:
        text = index.read_text(encoding="utf-8")
        assert not [
            page.name
            for page in index.parent.glob("*.md")
            if page != index and f"]({page.name})" not in text
        ]


@pytest.mark.parametrize("readme", ["README.md", "README_zh.md"])
def test_the_readme_is_short_and_has_a_picture(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert re.search(r"!\[[^\]]+\]\(docs/images/", text)


_DEFAULT_ROW = re.compile(r"^\| `(--[\w-]+)` \| ([^|]+) \| [^|]* \|$", re.MULTILINE)


def test_the_defaults_in_the_guides_are_those_of_the_flags() -> None:
    """Rows of a flag, its default, and its meaning; a dash where there is none."""
    rows = [
        (page, *row)
        for page in sorted((ROOT / "docs").glob("*/algorithms/*.md"))
        for row in _DEFAULT_ROW.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(rows) > 80
    table = flag_table()
    reported = {
        (page.name, flag): (default, default_text(table.spellings[flag].flag) or "–")
        for page, flag, default in rows
    }
    assert not {place: pair for place, pair in reported.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("folder", [ENGLISH, CHINESE], ids=name)
def test_the_results_are_of_what_is_registered(folder: Path) -> None:
    text = (folder / "algorithms/results.md").read_text(encoding="utf-8")
    tables = text.split(": end -->")
    for registry, table, flag in (
        (policy_losses, tables[0], "--policy-loss-type"),
        (advantage_estimators, tables[1], "--advantage-estimator"),
    ):
        listed = set(re.findall(rf"{flag} (\w+)", table))
        assert listed and listed <= set(registry.names())


def table_rows(path: Path) -> list[list[str]]:
    """Cells of the table of what works and what is refused: name, works, refused."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and line.count("|") == 4
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("folder", [ENGLISH, CHINESE], ids=name)
@pytest.mark.parametrize(
    "registered",
    [policy_losses.names(), advantage_estimators.names(), LOSS_REDUCTIONS],
    ids=["losses", "advantages", "reductions"],
)
def test_the_page_of_support_lists_what_is_registered(
    folder: Path, registered: Sequence[str]
) -> None:
    """A row of the table holds these names, and no others. (docs/flags.md has all of them.)"""
    listed = [set(re.findall(r"`(\w+)`", cells[1])) for cells in table_rows(folder / "support.md")]
    rows = [names for names in listed if len(names & set(registered)) >= len(names) / 2 > 1]
    assert any(names <= set(registered) for names in rows)


@pytest.mark.parametrize("folder", [ENGLISH, CHINESE], ids=name)
def test_the_wrong_command_line_is_answered_as_documented(folder: Path) -> None:
    page = (folder / "getting_started.md").read_text(encoding="utf-8")
    example = re.search(
        r"^\$ python train\.py (.*)\n(\d+ problems in the configuration:\n(?:  - .*\n)+)```",
        page,
        re.MULTILINE,
    )
    assert example is not None
    with pytest.raises(ConfigError) as error:
        parse_args(example[1].split(), 1)
    assert str(error.value).strip() == example[2].strip()


# Spelt in parts, so that this file does not name them
PLACES = [r"(?<![\w.$}])/" + r"work/", "/" + "tmp/bash_jobs", r"(?<![\w.$}])/" + r"root/"]
HOSTS = [
    "pypi" + r"\.(org|python)",
    "download" + r"\.pytorch",
    "files" + r"\.pythonhosted",
    "ali" + "yun",
    "tsing" + "hua",
    r"index-url[= ]+['\"]?http",
]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    banned = re.compile("|".join(PLACES + HOSTS))
    found = []
    for file in listed.stdout.decode().split("\0"):
        path = ROOT / file
        if not file or path.suffix in (".png", ".parquet", ".safetensors") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [
            f"{file}:{text.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in banned.finditer(text)
        ]
    assert not found
