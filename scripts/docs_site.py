"""Hooks of mkdocs.yml: build a site from the repository's Markdown, which also renders on GitHub.

The home pages are README.md and README_zh.md. The navigation is read from docs/en/index.md and
docs/zh/index.md: each language has its own menu. Links to files outside docs/ lead to copies of
these files. Every page is also there as Markdown, and llms.txt lists these (https://llmstxt.org).
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
HOMES = {"README.md": "index.md", "README_zh.md": "zh/home.md"}
PAGES = HOMES | {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
PAGES |= {
    path.relative_to(ROOT).as_posix(): f"recipes/{path.parent.name}.md"
    for path in sorted((ROOT / "scripts/recipes").glob("*/README.md"))
}
LANGUAGES = ("en", "zh")
_FENCED = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_LIST_AFTER_TEXT = re.compile(r"(?m)^((?![-*] |\d+\. |[ |#]).+)\n(?=(?:[-*]|1\.) )")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_MENU = re.compile(r'class="md-tabs__link">(.*?)</a>', re.DOTALL)
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_DOCSTRING = re.compile(r"^::: (\S+)$(?:\n+^    .+$)*", re.MULTILINE)
_DOCUMENTED = re.compile(r"^### `\w+`\n\n(?=::: )", re.MULTILINE)


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, in GitHub's format."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def navigation(language: str) -> list[dict[str, list[str]]]:
    """Sections of the index page of `language` with the pages that they link, relative to docs/. A
    page belongs to the first section that links it."""
    index = ROOT / "docs" / language / "index.md"
    _, *parts = _HEADING.split(index.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        links = [
            place(f"docs/{language}/index.md", m[3].split("#")[0]) for m in _LINK.finditer(text)
        ]
        before = {page for pages in found.values() for page in pages}
        found[title] = [
            p for p in dict.fromkeys(links) if p and p.endswith(".md") and p not in before
        ]
    return [{title: pages} for title, pages in found.items()]


def labels(language: str) -> dict[str, str]:
    """What the index page of `language` calls each page that it links."""
    index = f"docs/{language}/index.md"
    found: dict[str, str] = {}
    for _, label, target in _LINK.findall((ROOT / index).read_text(encoding="utf-8")):
        found.setdefault(place(index, target.split("#")[0]) or target, label)
    return found


def place(of: str, target: str) -> str | None:
    """Path on the site of a link target; None for a source folder.

    Args:
        of: File with the link, relative to the repository.
        target: Target relative to it, without anchor.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(of), target))
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return None if (ROOT / path).is_dir() else f"source/{path}.txt"


def for_the_site(text: str, of: str, at: str) -> str:
    """Convert the Markdown of the repository file `of` for the site page `at`: links lead to files
    of the site, and a list directly after text starts a new paragraph, as on GitHub."""

    def changed(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        there = place(of, path)
        if there is None:
            return label
        relative = posixpath.relpath(there, posixpath.dirname(at) or ".")
        return f"{picture}[{label}]({relative}{mark}{anchor})"

    parts = _FENCED.split(_DOCUMENTED.sub("", text))  # mkdocstrings adds these headings itself
    for i in range(0, len(parts), 2):
        parts[i] = _LIST_AFTER_TEXT.sub(r"\1\n\n", _LINK.sub(changed, parts[i]))
    return "".join(parts)


def linked_sources(pages: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Files outside docs/ that pages link to. pages: (path in the repository, text)."""
    for of, text in pages:
        for match in _LINK.finditer(_FENCED.sub("", text)):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(of), match[3].split("#")[0]))
            if (place(of, match[3].split("#")[0]) or "").startswith("source/") and (
                ROOT / path
            ).is_file():
                yield path


def original(page: str) -> str:
    """The repository file of a site page."""
    return {there: here for here, there in PAGES.items()}.get(page, f"docs/{page}")


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    english, chinese = (navigation(language) for language in LANGUAGES)
    config.nav = [
        {"slime_like": ["index.md", "en/index.md"]},
        *english,
        {"slime_like": ["zh/home.md", "zh/index.md"]},
        *chinese,
    ]
    return config


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Divide the menu into one a language. A page that both have, such as the flags, has the
    English menu; in the Chinese one it is a link."""
    from mkdocs.structure.nav import Link

    names = labels("zh")
    english, chinese = by_language(nav.items)
    for section in chinese:
        section.children = [
            page
            if page.file.src_uri.startswith("zh/")
            else Link(f"{names[page.file.src_uri]}（英文）", page.url)
            for page in section.children
        ]
    for section in english:
        for page in section.children:
            page.parent = section
    return nav


def by_language(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The sections of the English and of the Chinese menu."""
    half = len(items) // 2  # `on_config`: as many of each
    return items[:half], items[half:]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for here, there in PAGES.items():
        files.append(File.generated(config, there, content=(ROOT / here).read_text("utf-8")))
    pages = [(original(f.src_uri), f.content_string) for f in files if f.src_uri.endswith(".md")]
    for path in sorted(set(linked_sources(pages))):
        files.append(
            File.generated(config, f"source/{path}.txt", content=(ROOT / path).read_text("utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return for_the_site(markdown, original(page.file.src_uri), page.file.src_uri)


def twin(page: str) -> str | None:
    """The same page in the other language. page: Markdown or HTML."""
    suffix = posixpath.splitext(page)[1]
    homes = [home.replace(".md", suffix) for home in HOMES.values()]
    if page in homes:
        return homes[1 - homes.index(page)]
    folder, _, rest = page.partition("/")
    return f"{LANGUAGES[1 - LANGUAGES.index(folder)]}/{rest}" if folder in LANGUAGES else None


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Set the language of a page, its menu, and the link to the same page in the other language."""
    from mkdocs.structure.nav import Navigation

    at = page.file.src_uri
    context["nav"] = Navigation(list(by_language(nav.items)[at.startswith("zh/")]), nav.pages)
    context["nav"].homepage = page if at in HOMES.values() else nav.homepage
    config.theme["language"] = "zh" if at.startswith("zh/") else "en"
    other = twin(at) or "zh/index.md"  # a page that is in English only
    link = other.removesuffix("md") + "html"  # from the root; the theme makes it relative
    name, lang = ("English", "en") if at.startswith("zh/") else ("中文", "zh")
    config.extra["alternate"] = [{"name": name, "link": link, "lang": lang}]
    return context


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Turn empty header cells of tables into data cells, for screen readers."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add an accessible name to the search dialog, which Material lacks, and name the Markdown."""
    label = "搜索" if page.file.src_uri.startswith("zh/") else "Search"
    output = output.replace('role="dialog"', f'role="dialog" aria-label="{label}"')
    source = posixpath.basename(page.file.src_uri)
    link = f'<link rel="alternate" type="text/markdown" href="{source}">'
    return output.replace("</head>", f"{link}</head>", 1)


def as_markdown(text: str, of: str, at: str) -> str:
    """The page `at` as Markdown: its links lead to the Markdown of other pages, and docstrings,
    which are not in it, are named by where they are shown."""
    html = posixpath.basename(at).removesuffix("md") + "html"
    return _DOCSTRING.sub(rf"`\1`: [docstring]({html}#\1)", for_the_site(text, of, at))


def llms_txt(summary: str) -> str:
    """What a language model should read, by the convention of https://llmstxt.org: a title, a
    summary, and sections of links, which are those of the English index."""
    index = "docs/en/index.md"
    text = (ROOT / index).read_text(encoding="utf-8")
    sections = for_the_site(text[text.index("## ") :], index, "llms.txt")
    return (
        f"# slime_like\n\n> {summary}\n\nStart with the [README](index.md). "
        f"In Chinese: [README](zh/home.md), [pages](zh/index.md).\n\n{sections}"
    )


class _Built(HTMLParser):
    """Parses what a built page loads and links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors = {"", "__top", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.anchors |= {own[name] for name in ("id", "name") if name in own}
        where = self.links if tag == "a" else self.loads
        where += [own[name] for name in ("href", "src") if own.get(name)]


def problems(site: Path) -> list[str]:
    """Broken links and missing files of a built site, and resources that pages load from other
    hosts."""
    pages = {path: _Built(path.read_text("utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, built in pages.items():
        if path.name == "404.html":
            continue  # has absolute links
        here = path.relative_to(site)
        menu = " ".join(_MENU.findall(path.read_text("utf-8")))
        if menu and bool(_CHINESE.search(menu)) is not here.is_relative_to("zh"):
            found.append(f"{here}: has the menu of another language")
        found += [f"{here}: loads {u}" for u in built.loads if re.match(r"(https?:)?//", u)]
        for target in built.links + built.loads:
            if re.match(r"([a-z]+:)?//|[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            there = Path(os.path.normpath(path.parent / unquote(file))) if file else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                found.append(f"{here}: {target} leads nowhere")
            elif there in pages and unquote(anchor) not in pages[there].anchors:
                found.append(f"{here}: {target} has no such heading")
    return found


def search_by_language(site: Path) -> None:
    """Divide the search index into one a language, and let a page load that of its own. Also write
    each as a script, because a page opened from a local folder cannot load JSON.

    Pages that are in English only, such as the flags, are in both.
    """
    whole = site / "search/search_index.json"
    index = json.loads(whole.read_text("utf-8"))
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    chinese = {page for page in pages if page.startswith("zh/")}
    other = {page for page in pages - chinese if twin(page) in chinese}
    for language, left_out in (("en", chinese), ("zh", other)):
        found = [e for e in index["docs"] if e["location"].partition("#")[0] not in left_out]
        text = json.dumps({**index, "docs": found}, ensure_ascii=False, separators=(",", ":"))
        folder = site / "search" / language
        folder.mkdir(exist_ok=True)
        (folder / whole.name).write_text(text, "utf-8")
        (folder / f"{whole.stem}.js").write_text(f"var __index = {text}", "utf-8")
    whole.unlink()
    (theme,) = (site / "assets/javascripts").glob("bundle.*.min.js")
    code = theme.read_text("utf-8")
    for suffix in ("js", "json"):
        loaded = f'"search/search_index.{suffix}"'
        assert code.count(loaded) == 1, f"{theme.name} loads its search index in another way"
        own = f'"search/"+document.documentElement.lang+"/search_index.{suffix}"'
        code = code.replace(loaded, own)
    theme.write_text(code, "utf-8")


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    search_by_language(site)
    summary = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["description"]
    (site / "llms.txt").write_text(llms_txt(f"{summary}."), "utf-8")
    for path in sorted(site.rglob("*.html")):
        page = path.relative_to(site).with_suffix(".md").as_posix()
        if (ROOT / original(page)).is_file():
            text = (ROOT / original(page)).read_text("utf-8")
            (site / page).write_text(as_markdown(text, original(page), page), "utf-8")
    found = problems(Path(config.site_dir))
    if found:
        raise PluginError("\n".join(["links of the built site:", *found]))
