"""Hooks of mkdocs.yml: build a site from the repository's Markdown, which also renders on GitHub.

The home pages are README.md and README_zh.md. The navigation is read from docs/en/index.md and
docs/zh/index.md. Links to files outside docs/ lead to copies of these files.
"""

from __future__ import annotations

import os
import posixpath
import re
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
LANGUAGES = ("en", "zh")
_FENCED = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_LIST_AFTER_TEXT = re.compile(r"(?m)^((?![-*] |\d+\. |[ |#]).+)\n(?=(?:[-*]|1\.) )")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
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
        {"中文": ["zh/home.md", "zh/index.md", *chinese]},
    ]
    return config


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
    """The same page in the other language."""
    homes = list(HOMES.values())
    if page in homes:
        return homes[1 - homes.index(page)]
    folder, _, rest = page.partition("/")
    return f"{LANGUAGES[1 - LANGUAGES.index(folder)]}/{rest}" if folder in LANGUAGES else None


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Set the language of a page, and the link to the same page in the other language."""
    at = page.file.src_uri
    config.theme["language"] = "zh" if at.startswith("zh/") else "en"
    other = twin(at)
    if other is None:
        config.extra.pop("alternate", None)
    else:
        link = other.removesuffix("md") + "html"  # from the root; the theme makes it relative
        name, lang = ("English", "en") if at.startswith("zh/") else ("中文", "zh")
        config.extra["alternate"] = [{"name": name, "link": link, "lang": lang}]
    return context


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Turn empty header cells of tables into data cells, for screen readers."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add an accessible name to the search dialog, which Material lacks."""
    label = "搜索" if page.file.src_uri.startswith("zh/") else "Search"
    return output.replace('role="dialog"', f'role="dialog" aria-label="{label}"')


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


def search_from_a_folder(site: Path) -> None:
    """Also write the search index as a script, because a page opened from a local folder cannot
    load JSON."""
    index = (site / "search/search_index.json").read_text("utf-8")
    (site / "search/search_index.js").write_text(f"var __index = {index}", "utf-8")


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    search_from_a_folder(Path(config.site_dir))
    found = problems(Path(config.site_dir))
    if found:
        raise PluginError("\n".join(["links of the built site:", *found]))
