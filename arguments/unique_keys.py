"""Load YAML and JSON with an error for duplicate keys; the standard loaders silently keep the
last one."""

from __future__ import annotations

import json
from collections.abc import Hashable

import yaml


class Key(str):
    """A key of a YAML file. line: its line number, from 1."""

    line: int


class _Loader(yaml.SafeLoader):
    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value).replace("-", "_")
            if key in lines:
                raise yaml.YAMLError(
                    f"line {line}: the key {key_node.value!r} is given twice, "
                    f"first in line {lines[key]}; keep one of them"
                )
            lines[key] = line
        made = super().construct_mapping(node, deep)
        return {_with_line(key, lines): value for key, value in made.items()}


def _with_line(key: object, lines: dict[str, int]) -> object:
    line = lines.get(str(key).replace("-", "_"))
    if not isinstance(key, str) or line is None:
        return key
    made = Key(key)
    made.line = line
    return made


def load_yaml(text: str, *, with_lines: bool = False) -> object:
    """Load YAML. Dashes in keys become underscores.

    Args:
        text: Content of the file.
        with_lines: Return string keys as `Key`.

    Raises:
        yaml.YAMLError: A key is duplicated; names both lines.
    """
    content = yaml.load(text, _Loader)
    return content if with_lines else plain(content)


def plain(value: object) -> object:
    """Replace each `Key` in `value` by a plain string."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {str(k) if isinstance(k, Key) else k: plain(v) for k, v in value.items()}


def load_json(text: str) -> object:
    """Load JSON. Raises ValueError naming a duplicate key."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice; keep one of them")
        result[key] = value
    return result
