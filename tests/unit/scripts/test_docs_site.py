"""The site that make docs builds of the documents; building it is a step of .ci/run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from scripts.docs_site import (
    as_markdown,
    by_language,
    for_the_site,
    labels,
    linked_sources,
    llms_txt,
    navigation,
    on_config,
    place,
    problems,
    slug,
    twin,
)
from tests.paths import ROOT


def test_the_navigation_is_the_index_and_alike_in_both_languages() -> None:
    english, chinese = (
        [
            [page.removeprefix(f"{lang}/") for page in pages]
            for part in navigation(lang)
            for pages in part.values()
        ]
        for lang in ("en", "zh")
    )
    assert english == chinese
    assert [next(iter(part)) for part in navigation("en")] == [
        *("Start here", "Concepts", "Guides", "Reference", "Coming from", "Extend it", "Measured")
    ]
    flat = [page for pages in english for page in pages]
    assert len(flat) == len(set(flat)) > 30


def test_each_language_has_a_menu_of_its_own() -> None:
    config = SimpleNamespace(mdx_configs={})
    english, chinese = by_language(on_config(config).nav)
    pages = [page for part in english for page in next(iter(part.values()))]
    assert "index.md" in pages and not [page for page in pages if page.startswith("zh/")]
    pages = [page for part in chinese for page in next(iter(part.values()))]
    assert "zh/home.md" in pages and not [page for page in pages if page.startswith("en/")]
    both = {page for page in pages if not page.startswith("zh/")}  # links of the Chinese menu
    assert {"flags.md", "changelog.md"} <= both <= set(labels("zh"))
    assert labels("zh")["flags.md"] == "参数"


def test_a_menu_of_another_language_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "zh").mkdir()
    item = '<a href="#" class="md-tabs__link">\n {}\n</a>'
    (tmp_path / "a.html").write_text(item.format("Guides"))
    (tmp_path / "zh/a.html").write_text(item.format("指南"))
    assert problems(tmp_path) == []
    (tmp_path / "a.html").write_text(item.format("Guides") + item.format("中文"))
    (tmp_path / "zh/a.html").write_text(item.format("Guides"))
    assert sorted(problems(tmp_path)) == [
        "a.html: has the menu of another language",
        "zh/a.html: has the menu of another language",
    ]


def test_llms_txt_lists_every_english_page() -> None:
    """Its form is a title, a summary, and sections of links to Markdown (llmstxt.org)."""
    text = llms_txt("What it is.")
    assert text.startswith("# slime_like\n\n> What it is.\n\n")
    links = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    assert {page for part in navigation("en") for page in next(iter(part.values()))} <= links
    assert all(link.endswith(".md") for link in links)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[0] == "Start here"


def test_a_page_as_markdown_names_its_docstrings() -> None:
    text = "[f](flags.md)\n\n### `x`\n\n::: a.b.x\n    options:\n      members: false\n\nEnd.\n"
    assert as_markdown(text, "docs/python_api.md", "python_api.md") == (
        "[f](flags.md)\n\n`a.b.x`: [docstring](python_api.html#a.b.x)\n\nEnd.\n"
    )


@pytest.mark.parametrize(
    ("target", "there"),
    [
        ("rollouts.md", "en/rollouts.md"),
        ("../flags.md", "flags.md"),
        ("../../README.md", "index.md"),
        ("../../CHANGELOG.md", "changelog.md"),
        ("../images/demo.png", "images/demo.png"),
        ("../../examples/minimal_rl.py", "source/examples/minimal_rl.py.txt"),
        ("../../examples", None),
    ],
)
def test_links_of_a_page_lead_to_places_of_the_site(target: str, there: str | None) -> None:
    assert place("docs/en/moe.md", target) == there


def test_what_is_changed_for_the_site() -> None:
    text = (
        "Read [this](docs/en/moe.md#experts), [all](slime_like), [x](https://x.y) and:\n"
        "- ![a](docs/images/demo.png)\n- b\n```text\n[this](docs/en/moe.md)\n```\n"
    )
    assert for_the_site(text, "README.md", "index.md") == (
        "Read [this](en/moe.md#experts), all, [x](https://x.y) and:\n\n- ![a](images/demo.png)\n"
        "- b\n```text\n[this](docs/en/moe.md)\n```\n"
    )
    assert (
        for_the_site("[a](../../train.py)", "docs/en/x.md", "en/x.md")
        == "[a](../source/train.py.txt)"
    )
    assert list(linked_sources([("docs/en/x.md", "[a](../../train.py) [b](../../no.py)")])) == [
        "train.py"
    ]
    assert slug("What `--a` does, and 中文") == "what---a-does-and-中文"
    assert (twin("en/a/b.md"), twin("index.md"), twin("flags.md")) == (
        "zh/a/b.md",
        "zh/home.md",
        None,
    )


def test_problems_of_a_built_site(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x">A</h1><a href="b.html#y">b</a><a href="#x">x</a><a href="c.html">c</a><a href="https://a.b">out</a>'
        '<script src="https://cdn.example/x.js"></script>'
    )
    (tmp_path / "b.html").write_text("<a href='a.html#x'>a</a>")
    assert problems(tmp_path) == [
        "a.html: loads https://cdn.example/x.js",
        "a.html: b.html#y has no such heading",
        "a.html: c.html leads nowhere",
    ]


def test_nothing_is_fetched_and_warnings_are_errors() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    for name in config["extra_javascript"] + config["extra_css"]:
        assert "//" not in (ROOT / "docs" / name).read_text(encoding="utf-8").replace("// ", "")
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
    assert "make docs\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_of_metrics_is_complete(language: str) -> None:
    """But for those of a loss, an estimator or a correction, which are made of a variable name."""
    page = (ROOT / "docs" / language / "metrics.md").read_text(encoding="utf-8")
    source = "".join(p.read_text() for p in sorted((ROOT / "slime_like").rglob("*.py")))
    kinds = "train|rollout|reward|perf|engine|health"
    names = set(re.findall(rf'(?<!f)"((?:{kinds})/[a-z]\w+)"', source))
    names.discard("rollout/train_rollout_log_prob_diff")  # with _mean, _p99 and _max
    assert len(names) > 40
    assert not sorted(n for n in names if f"`{n}`" not in page)
    made = "".join(source.replace("{prefix}", prefix) for prefix in ("", "critic_"))
    assert not sorted(
        n
        for n in re.findall(rf"`((?:{kinds})/[a-z_]+)`", page)
        if n not in made
        and not n.endswith("_s")
        # a backend's own have their prefix from the trainer
        and f'"{n.partition("/")[2]}"' not in source
    )
