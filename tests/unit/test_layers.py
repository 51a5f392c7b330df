"""Imports follow the layers of docs/architecture.md: a lower layer never imports a higher one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.unit.command_lines import complete

# From the bottom to the top. A module belongs to the longest name that it starts with.
LAYERS = (
    (
        "slime_like",
        "slime_like.autograd",
        "slime_like.checked_json",
        "slime_like.checkpoints",
        "slime_like.config",
        "slime_like.distributed",
        "slime_like.errors",
        "slime_like.extras",
        "slime_like.function_args",
        "slime_like.hf_class",
        "slime_like.images",
        "slime_like.import_utils",
        "slime_like.lazy",
        "slime_like.logs",
        "slime_like.metrics",
        "slime_like.ngrams",
        "slime_like.origin_check",
        "slime_like.registry",
        "slime_like.samples",
        "slime_like.slime_modules",
        "slime_like.template",
        "slime_like.text",
        "slime_like.token_columns",
        "slime_like.torchrun",
        "slime_like.types",
        "slime_like.validation",
        "slime_like.yarn",
    ),
    (
        "slime_like.advantages",
        "slime_like.doctor",
        "slime_like.engines.base",
        "slime_like.engines.registry",
        "slime_like.environments",
        "slime_like.losses",
        "slime_like.megatron.ops",
        "slime_like.programs",
        "slime_like.rewards",
        "slime_like.standard_sets",
        "slime_like.weight_sync.transports.base",
        "slime_like.weights.attention_sizes",
        "slime_like.weights.families",
        "slime_like.weights.layer_sizes",
        "slime_like.weights.mappings",
        "slime_like.weights.stacked_experts",
        "megatron_patches",
    ),
    ("slime_like.report",),
    ("slime_like.reward_server",),
    ("arguments",),
    (
        "slime_like.data",
        "slime_like.engines",
        "slime_like.guards",
        "slime_like.megatron",
        "slime_like.rollout",
        "slime_like.servers",
        "slime_like.sglang",
        "slime_like.vllm",
        "slime_like.weight_sync",
        "slime_like.weights",
    ),
    ("slime_like.batching",),
    ("slime_like.agents", "slime_like.certify", "slime_like.compat", "slime_like.conversion"),
    ("slime_like.trainer", "slime_like.preflight"),
    ("train",),
    ("slime_like.server", "slime_like.tinker"),
    ("slime_like.cli", "scripts", "benchmarks"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PACKAGES = ("slime_like", "arguments", "megatron_patches", "scripts", "benchmarks")
MAY_IMPORT_MEGATRON = (
    "arguments.megatron_configs",
    "megatron_patches",
    "slime_like.megatron",
    "slime_like.conversion",
    "slime_like.preflight",
    "slime_like.cli",
    "scripts",
    "benchmarks",
)
# Importing these costs seconds or needs a device; what is imported below `arguments` is imported by
# every wrong command line.
HEAVY = (
    "torch",
    "transformers",
    "megatron",
    "reasoning_gym",
    "math_verify",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "transformer_engine",
    "wandb",
    "mlflow",
    "trackio",
)
LIGHT = (
    "slime_like.losses",
    "slime_like.advantages",
    "slime_like.rewards",
    "slime_like.config",
    "slime_like.checkpoints",
    "slime_like.types",
    "slime_like.registry",
    "slime_like.lazy",
    "slime_like.metrics.typed",
    "slime_like.metrics.trackers",
    "arguments",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def all_modules() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): path for path in [*files, ROOT / "train.py"]}


MODULES = all_modules()


def place(module: str) -> str | None:
    """The longest name in the table of layers that `module` lies in."""
    parts = module.split(".")
    candidates = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in candidates if name in LEVEL), None)


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path, *, at_import_time: bool = False, annotations: bool = False) -> set[str]:
    """Modules that the file names.

    Args:
        at_import_time: Not those inside functions.
        annotations: Those under TYPE_CHECKING too.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [syntax_of(path)]
    while waiting:
        node = waiting.pop()
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.If) and is_for_types and not annotations:
            waiting += node.orelse
            continue
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (submodules & MODULES.keys()) or {node.module}
        waiting += ast.iter_child_nodes(node)
    return found


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_every_module_has_a_layer() -> None:
    unplaced = [module for module in MODULES if place(module) is None]
    inside_none = [
        module
        for module in MODULES
        if place(module) == "slime_like" and module not in ("slime_like",)
    ]
    assert not unplaced + inside_none, "add these to LAYERS"


def test_no_import_from_a_higher_layer() -> None:
    higher = [
        f"{module} ({own}) imports {name}"
        for module, path in MODULES.items()
        if (own := place(module))
        for name in imports_of(path)
        if (to := place(name)) and LEVEL[to] > LEVEL[own]
    ]
    assert not higher


INTERFACES = (
    "slime_like.engines.base",
    "slime_like.engines.registry",
    "slime_like.weight_sync.transports.base",
    "slime_like.weights.attention_sizes",
    "slime_like.weights.families",
    "slime_like.weights.layer_sizes",
    "slime_like.weights.mappings",  # what a family is made of
    "slime_like.weights.stacked_experts",
)


def package_of(module: str) -> str:
    """`slime_like.rollout` of `slime_like.engines.base`; a loose module is its own, and so
    is an interface or a registry that others implement."""
    parts = module.split(".")
    if registry := next((r for r in INTERFACES if is_in(module, (r,))), None):
        return registry
    if parts[0] != "slime_like":
        return parts[0]
    is_package = len(parts) > 2 or MODULES[module].name == "__init__.py"
    return ".".join(parts[:2]) if is_package else module


def cycles(edges: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """The sets of two or more nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen, waiting = set[str](), list(edges[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += edges.get(node, ())
        reached[start] = seen
    found = {
        frozenset(n for n in reached[start] if start in reached.get(n, ())) for start in reached
    }
    return sorted((cycle for cycle in found if len(cycle) > 1), key=sorted)


def test_packages_import_each_other_one_way() -> None:
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        own = package_of(module)
        used = {package_of(name) for name in imports_of(path) if name in MODULES}
        edges.setdefault(own, set()).update(used - {own})
    assert cycles(edges) == []


def test_modules_import_each_other_one_way() -> None:
    """Imports within functions and for annotations count, too."""
    edges = {
        module: (imports_of(path, annotations=True) & MODULES.keys()) - {module}
        for module, path in MODULES.items()
    }
    assert cycles(edges) == []


def test_a_cycle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"a"}}
    assert cycles(edges) == [frozenset({"b", "c"})]


def test_no_core_module_knows_the_conventions_of_others() -> None:
    """slime's are an adapter package; its path is looked up in one place, when a flag names a
    function."""
    core = {
        module: path
        for module, path in MODULES.items()
        if not is_in(module, ("slime_like.compat",))
    }
    importing = [
        module
        for module, path in core.items()
        if any(is_in(name, ("slime_like.compat",)) for name in imports_of(path))
    ]
    assert not importing
    naming = {
        module
        for module, path in core.items()
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.Constant) and str(node.value).startswith("slime_like.compat")
    }
    # the second is for files that import slime, and loads it with them
    assert naming == {"slime_like.rollout.hooks", "slime_like.slime_modules"}


def test_relative_imports_are_not_used() -> None:
    """They would escape the rules above."""
    relative = [
        module for module, path in MODULES.items()
        if any(isinstance(node,
            ast.ImportFrom) and node.level for node in ast.walk(syntax_of(path)))
    ]  # fmt: skip
    assert not relative


def test_megatron_is_imported_only_where_it_belongs() -> None:
    elsewhere = [
        module for module, path in MODULES.items()
        if not is_in(module,
            MAY_IMPORT_MEGATRON) and any(is_in(name, ("megatron",)) for name in imports_of(path))
    ]  # fmt: skip
    assert not elsewhere


def test_the_report_reads_files_alone() -> None:
    """It opens where there is no torch, of a run of any version."""
    own = {m: path for m, path in MODULES.items() if is_in(m, ("slime_like.report",))}
    used = {name for path in own.values() for name in imports_of(path)}
    pictures = tuple(f"slime_like.images.{name}" for name in ("encoded", "files", "recorded"))
    allowed = ("slime_like.report", "slime_like.metrics", "slime_like.text", *pictures)
    ours = {n for n in used if is_in(n, ("slime_like",)) and n != "slime_like"}
    assert own and ours and not {n for n in ours if not is_in(n, allowed)}
    assert not {n for n in used if is_in(n, (*HEAVY, "arguments"))}


def test_argparse_is_not_imported_by_the_library() -> None:
    """A namespace of arguments must not travel. Programs may have flags, and there is one parser of
    the launchers."""
    programs = [
        module
        for module, path in MODULES.items()
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    users = [module for module, path in MODULES.items() if "argparse" in imports_of(path)]
    assert set(users) <= {*programs, "arguments.parser"}


def test_a_wrong_command_line_imports_nothing_heavy() -> None:
    heavy = {
        module: sorted(found)
        for module, path in MODULES.items()
        if is_in(module, LIGHT)
        and (
            found := {name for name in imports_of(path, at_import_time=True) if is_in(name, HEAVY)}
        )
    }
    assert not heavy


RUN_AND_LIST = """
import json, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [(["--help"], 0), (["--version"], 0), (["--tensor-model-parallel-size", "3"], 2)],
)
def test_what_a_command_line_without_a_run_imports(
    words: list[str], status: int, tmp_path: Path
) -> None:
    """The rules look at a line that is whole but for one flag; --help and --version end before."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST, str(ROOT / "train.py"), *complete(tmp_path), *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == status, done.stderr
    roots = {"megatron.core" if name == "megatron" else name for name in HEAVY}  # a namespace
    assert not roots & set(modules)
    assert "slime_like.losses" in modules


def test_the_walk_over_imports_sees_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport json\nif TYPE_CHECKING:\n    import yaml\n"
        "from slime_like import registry\ndef f():\n    import megatron.core\n"
    )
    assert imports_of(file) == {"typing", "json", "slime_like.registry", "megatron.core"}
    assert "megatron.core" not in imports_of(file, at_import_time=True)


# Modules in which a function or class may take the whole `RunConfig`, by what they do with it.
# Everything else gets the groups of settings that it needs.
WHOLE_RUN = {
    "start a run, record it or look at all of it": (
        "slime_like.preflight",
        "slime_like.tinker.api_process",
        "slime_like.tinker.fingerprint",
        "slime_like.tinker.launch",
        "slime_like.tinker.worker",
        "slime_like.trainer.launch",
        "slime_like.trainer.python_api",
        "slime_like.trainer.run_record",
        "slime_like.trainer.saved_settings",
        "slime_like.trainer.trainer",
    ),
    "build its parts": (
        "slime_like.agents.factory",
        "slime_like.batching.factory",
        "slime_like.data.factory",
        "slime_like.engines.registry",
        "slime_like.engines.serving_factory",
        "slime_like.engines.sglang.factory",
        "slime_like.engines.vllm.factory",
        "slime_like.megatron.backend",
        "slime_like.megatron.factory",
        "slime_like.rollout.factory",
        "slime_like.tinker.factory",
        "slime_like.tinker.sglang_factory",
        "slime_like.trainer.factory",
        "slime_like.trainer.sampling_factory",
    ),
    "give it to functions of the user": (
        "slime_like.batching.user_hooks",
        "slime_like.compat.slime",
        "slime_like.rollout.hooks",
    ),
}


def takes_run_config(tree: ast.Module) -> bool:
    """Whether a parameter or a field of a class is annotated with `RunConfig`."""
    annotations = [
        node.annotation
        for node in ast.walk(tree)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None
    ]
    return any("RunConfig" in ast.unparse(annotation) for annotation in annotations)


def test_components_take_their_own_settings() -> None:
    allowed = [name for names in WHOLE_RUN.values() for name in names]
    found = set()
    for path in (ROOT / "slime_like").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if takes_run_config(ast.parse(path.read_text(encoding="utf-8"))):
            owner = [name for name in allowed if f"{module}.".startswith(f"{name}.")]
            assert owner, f"{module} takes the whole RunConfig; give it the groups that it needs"
            found.update(owner)
    assert found == set(allowed)
