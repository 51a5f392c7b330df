"""Derive flags from dataclass fields.

Our dataclasses declare settings with `arg()`. megatron-core's fields have an annotation, a default
and sometimes `argparse_meta` metadata. They are read from its source text, because importing it
takes seconds, and an error in the command line should be reported sooner.
"""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_like.config import Range, flag_name

Kind = Literal["value", "list", "switch", "json"]

# Prefix of flags that are passed on -> the setting that collects them.
PASSED_ON: Mapping[str, str] = {
    "--sglang-": "sglang_server_flags",
    "--router-": "sglang_router_flags",
    "--vllm-": "vllm_server_flags",
}
# List fields to which every occurrence of the flag adds.
APPENDED = ("rollout_sample_hook_path",)
# Fields that scripts set from a variable that may be empty -> what applies then.
MAY_BE_EMPTY: Mapping[str, str] = {
    "wandb_key": "W&B uses WANDB_API_KEY or wandb login",
}


def normalise(name: str) -> str:
    """``--Sapo.tau_pos`` -> ``--sapo-tau-pos``: dashes, underscores and SkyRL's dots are
    equivalent."""
    return "--" + name.lstrip("-").replace("_", "-").replace(".", "-")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag on the command line."""

    dest: str  # field name
    group: str
    kind: Kind
    help: str
    on: tuple[str, ...]  # spellings; messages use the first
    off: tuple[str, ...] = ()  # spellings that turn a switch off
    item: type = str  # type of the value, or of each item of a list
    default: object = None
    default_text: str = ""  # shown instead of `default`
    choices: tuple[object, ...] | None = None
    legal: Range | None = None
    metavar: str | None = None
    rejection: str = ""  # why the flag is not supported; empty if it is
    needs: tuple[str, ...] = ()  # see `slime_like.config.arg`
    only_with: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    required_with: tuple[str, ...] = ()
    idle_without: tuple[str, ...] = ()
    relations: tuple[tuple[str, str], ...] = ()  # (kind, name of the other setting)

    @property
    def name(self) -> str:
        """The spelling that changes the default."""
        on_by_default = self.kind == "switch" and self.default is True
        return self.off[0] if on_by_default and self.off else self.on[0]

    @property
    def type_name(self) -> str:
        if self.kind == "switch":
            return "switch"
        if self.kind == "json":
            return "JSON object"
        return f"{self.item.__name__} ..." if self.kind == "list" else self.item.__name__


@dataclass(frozen=True, slots=True)
class Shape:
    """Command-line shape of an annotation."""

    kind: Kind
    item: type = str
    choices: tuple[object, ...] | None = None


def shape_of(annotation: object) -> Shape | None:
    """The command-line shape of an annotation; None if it has none: callables, dtypes, unions of
    different kinds."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is bool:
        return Shape("switch")
    if annotation in (int, float, str):
        return Shape("value", annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not type(None)]
        return shape_of(rest[0]) if len(rest) == 1 else None
    if origin is Literal:
        return Shape("value", type(arguments[0]), arguments)
    if origin is list:
        inner = shape_of(arguments[0])
        if inner is None or inner.kind != "value":
            return None
        return Shape("list", inner.item, inner.choices)
    if origin is dict:
        return Shape("json")
    return None


def spellings_of(dest: str, kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Spellings that set a flag, and those that turn a switch off. Every switch has both, because
    the command line may override a run file or a checkpoint."""
    if kind != "switch" or dest.startswith(("no_", "disable_")):
        return (flag_name(dest),), ()
    return (flag_name(dest),), (flag_name(f"no_{dest}"),)


def flags_of(
    config_type: type, group: str, choices: Mapping[str, Sequence[str]] = types.MappingProxyType({})
) -> list[Flag]:
    """The flags of a dataclass whose fields are declared with `arg()`. choices: legal values that
    are only known at run time."""
    hints = typing.get_type_hints(config_type)
    flags = []
    for field in dataclasses.fields(config_type):
        meta = field.metadata
        if not meta.get("flag", True):
            continue
        shape = shape_of(hints[field.name])
        assert shape is not None, (
            f"{config_type.__name__}.{field.name}: no flag can be made of {hints[field.name]}"
        )
        on, off = spellings_of(field.name, shape.kind)
        legal = choices.get(field.name) or meta.get("choices") or shape.choices
        flags.append(
            Flag(
                dest=field.name,
                group=group,
                kind=shape.kind,
                item=shape.item,
                help=meta["help"],
                on=(*on, *meta.get("aliases", ())),
                off=off,
                default=default_of(field),
                choices=tuple(legal) if legal else None,
                legal=meta.get("legal"),
                metavar=meta.get("metavar"),
                needs=meta.get("needs", ()),
                only_with=meta.get("only_with", ()),
                excludes=meta.get("excludes", ()),
                required_with=meta.get("required_with", ()),
                idle_without=meta.get("idle_without", ()),
                relations=meta.get("relations", ()),
            )
        )
    return flags


def default_of(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


@dataclass(frozen=True, slots=True)
class SourceField:
    """A dataclass field read from source text."""

    name: str
    annotation: object  # any for types that are not plain
    default: object
    known_default: bool  # False if the default is not a constant expression; `default` is then None
    arg_names: tuple[str, ...]


class _Names(dict[str, object]):
    """Namespace for evaluating annotations: names of `typing`, Any for all others."""

    def __missing__(self, key: str) -> object:
        return getattr(typing, key, Any)


_ANNOTATION_NAMES = _Names(
    bool=bool, int=int, float=float, str=str, list=list, dict=dict, tuple=tuple
)


def read_source_fields(path: Path, class_name: str) -> list[SourceField]:
    """The fields that a class defines in the file `path`, in order; inherited ones are in the file
    of the base class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    fields = []
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        default, known, arg_names = _default(node.value)
        fields.append(
            SourceField(node.target.id, _annotation(node.annotation), default, known, arg_names)
        )
    return fields


class _WithoutModules(ast.NodeTransformer):
    """Replace attributes of modules, such as torch.dtype, by Any."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name("Any")


def _annotation(node: ast.expr) -> object:
    plain = ast.unparse(_WithoutModules().visit(node))
    return eval(plain, {"__builtins__": {}}, _ANNOTATION_NAMES)


def _constant(node: ast.expr | None) -> tuple[object, bool]:
    """(value, whether the expression is constant); arithmetic such as 2**32 is supported."""
    if node is None or any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(node)):
        return None, False
    return eval(ast.unparse(node), {"__builtins__": {}}), True


def _default(node: ast.expr | None) -> tuple[object, bool, tuple[str, ...]]:
    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field"
    ):
        return *_constant(node), ()
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    metadata, _ = _constant(keywords.get("metadata"))
    meta = metadata.get("argparse_meta", {}) if isinstance(metadata, dict) else {}
    arg_names = meta.get("arg_names", ())
    return *_constant(keywords.get("default")), tuple(arg_names)
