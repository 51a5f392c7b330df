"""Dataclass fields and megatron-core's source text -> flags."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from arguments.flag_registry import FlagTable, flag_table, without_clashes
from arguments.flags import Flag, flags_of, read_source_fields, shape_of
from arguments.megatron import DERIVED, megatron_fields, megatron_flags
from arguments.megatron_fields import (
    DATA_PARALLEL,
    EXPERTS,
    FIELDS,
    NETWORK,
    OPTIMIZER,
    SOME_RELEASES,
)
from slime_like.config import POSITIVE, arg, flag_name


@dataclass(frozen=True)
class Example:
    name: str = arg("x", "A name.", choices=("x", "y"), aliases=("--title",))
    rate: float | None = arg(None, "A rate.", legal=POSITIVE)
    layers: list[int] | None = arg(None, "Layers.")
    options: dict[str, Any] = arg({}, "Options.")
    fused: bool = arg(True, "Fused.")
    shuffle: bool = arg(False, "Shuffled.")
    no_cache: bool = arg(False, "Not cached.")


def test_flags_of_our_own_dataclass() -> None:
    flags = {flag.dest: flag for flag in flags_of(Example, "example")}
    assert flags["name"].on == ("--name", "--title") and flags["name"].choices == ("x", "y")
    assert (
        flags["rate"].item is float
        and flags["rate"].legal is POSITIVE
        and flags["rate"].default is None
    )
    assert (flags["layers"].kind, flags["layers"].item) == ("list", int)
    assert (flags["options"].kind, flags["options"].default) == ("json", {})
    assert flags["fused"].name == "--no-fused" and flags["fused"].on == ("--fused",)
    assert flags["shuffle"].name == "--shuffle" and flags["shuffle"].off == ("--no-shuffle",)
    assert flags["no_cache"].name == "--no-cache" and flags["no_cache"].off == ()


def test_registry_choices_come_in_from_outside() -> None:
    flags = {flag.dest: flag for flag in flags_of(Example, "example", {"rate": ["1"]})}
    assert flags["rate"].choices == ("1",)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Literal["a", "b"], ("value", str, ("a", "b"))),
        (int | None, ("value", int, None)),
        (list[float], ("list", float, None)),
        (bool, ("switch", str, None)),
    ],
)
def test_shape_of_annotations(annotation: Any, expected: tuple[Any, ...]) -> None:
    shape = shape_of(annotation)
    assert shape is not None and (shape.kind, shape.item, shape.choices) == expected


@pytest.mark.parametrize("annotation", [torch.dtype, int | list[int], str | list[str] | None, Any])
def test_annotations_without_words(annotation: Any) -> None:
    assert shape_of(annotation) is None


def test_source_text_is_read_without_running_it(tmp_path: Path) -> None:
    source = tmp_path / "config.py"
    source.write_text(
        "import does_not_exist\n"
        "class Config:\n"
        "    width: int = 2**4\n"
        "    'The width.\\n    In units.'\n"
        "    eps: float = field(default=1e-5, metadata={'argparse_meta': {'arg_names': "
        "['--norm-eps']}})\n"
        "    backend: Backend = Backend.auto\n"
        "    kind: Optional[Literal['a', 'b']] = None\n"
        "    'The kind.'\n"
        "    dtype: torch.dtype = torch.float32\n"
        "    hook: Optional[Callable[[torch.Tensor], torch.Tensor]] = None\n"
        "    def method(self): ...\n"
    )
    fields = {f.name: f for f in read_source_fields(source, "Config")}
    assert (fields["width"].annotation, fields["width"].default) == (int, 16)
    assert (fields["eps"].default, fields["eps"].arg_names) == (1e-5, ("--norm-eps",))
    assert not fields["backend"].known_default and not fields["dtype"].known_default
    assert "Callable" in str(fields["hook"].annotation) and fields["dtype"].annotation is Any
    assert shape_of(fields["kind"].annotation) is not None
    assert list(fields) == ["width", "eps", "backend", "kind", "dtype", "hook"]


def test_source_text_agrees_with_the_imported_classes() -> None:
    """Names, defaults and annotations are those that megatron-core has at run time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.transformer_config import TransformerConfig
    classes = {
        "network": TransformerConfig,
        "optimizer": OptimizerConfig,
        "data": DistributedDataParallelConfig,
    }
    read = megatron_fields()
    for word, config_type in classes.items():
        real = {f.name: f for f in dataclasses.fields(config_type)}
        here = {
            name: source
            for name, places in read.items()
            for group, source in places
            if group.startswith(word)
        }
        assert set(here) == set(real)
        for name, source in here.items():
            if source.known_default:
                assert source.default == real[name].default, name


def test_a_field_of_megatron_core_may_have_any_name() -> None:
    """Its next release may bring names that others have; what works here keeps its spellings."""

    def flag(dest: str, *also: str, rejection: str = "of another release") -> Flag:
        return Flag(dest, "g", "value", "", (*also, flag_name(dest)), rejection=rejection)

    ours = [flag("buckets", "--count", rejection="")]
    megatron = [
        flag("fp4_param", "--fp4-param-gather"),
        flag("lr", rejection=""),
        flag("fp4_param_gather"),
        flag("rate", "--lr"),
        flag("buckets"),
        flag("count"),
        flag("new", "--also"),
        flag("newer", "--also"),
    ]
    table = FlagTable([*ours, *without_clashes(ours, megatron)])
    assert {name: spelling.flag.dest for name, spelling in table.spellings.items()} == {
        "--buckets": "buckets", "--count": "buckets", "--lr": "lr", "--rate": "rate",
        "--fp4-param": "fp4_param",
        "--fp4-param-gather": "fp4_param_gather", "--new": "new", "--also": "new",
        "--newer": "newer",
    }  # fmt: skip
    assert not table.by_dest["buckets"].rejection and table.by_dest["fp4_param_gather"].rejection


def test_values_that_a_release_adds_are_not_legal_by_that() -> None:
    """Every word that works here is listed here."""
    words = {flag.dest for flag in megatron_flags() if not flag.rejection and flag.choices}
    listed = {name for name, field in FIELDS.items() if field.choices or field.dtypes}
    assert words | SOME_RELEASES & listed == listed


def test_supported_fields_exist_and_each_field_is_decided_once() -> None:
    names = set(megatron_fields())
    supported = set(FIELDS)
    assert names >= supported - SOME_RELEASES and supported > SOME_RELEASES
    assert not supported & DERIVED
    flags = {flag.dest: flag for flag in megatron_flags()}
    assert {name for name, flag in flags.items() if not flag.rejection} == supported & names
    without_flag = names - set(flags) - DERIVED
    types = {name: str(megatron_fields()[name][0][1].annotation) for name in without_flag}
    assert all("Callable" in words or name.endswith("dtype") for name, words in types.items()), (
        types
    )


def test_every_exposed_flag_of_megatron_core_has_a_sentence_of_its_own() -> None:
    """And no sentence is about a flag that is refused or gone, nor names a flag that does not
    exist."""
    exposed = {flag.dest: flag for flag in megatron_flags() if not flag.rejection}
    texts = {name: field.help for name, field in FIELDS.items()}
    assert set(texts) - SOME_RELEASES == set(exposed) - SOME_RELEASES
    assert (
        len(NETWORK) + len(EXPERTS) + len(OPTIMIZER) + len(DATA_PARALLEL)
        == len(texts)
        == len(set(texts.values()))
    )
    assert {
        name: len(words)
        for name, words in texts.items()
        if len(words) > 160 or not words.endswith(".")
    } == {}
    assert exposed["clip_grad"].help == f"{texts['clip_grad']} (clip_grad of OptimizerConfig)"
    known = flag_table().spellings
    named = {
        word
        for words in texts.values()
        for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", words)
    }
    assert len(named) > 20 and named <= set(known), named - set(known)


@pytest.mark.parametrize(
    ("dest", "name", "also"),
    [
        ("layernorm_epsilon", "--norm-epsilon", "--layernorm-epsilon"),
        ("add_bias_linear", "--disable-bias-linear", "--add-bias-linear"),
        ("grad_reduce_in_fp32", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-fp32"),
        ("apply_rope_fusion", "--apply-rope-fusion", "--no-rope-fusion"),
        ("bias_activation_fusion", "--bias-activation-fusion", "--no-bias-swiglu-fusion"),
        ("gradient_accumulation_fusion", "--gradient-accumulation-fusion",
         "--no-gradient-accumulation-fusion"),
        ("perform_initialization", "--no-initialization", "--perform-initialization"),
        ("attention_softmax_in_fp32", "--no-attention-softmax-in-fp32",
         "--attention-softmax-in-fp32"),
        ("num_moe_experts", "--num-experts", "--num-moe-experts"),
        ("fp8", "--fp8-format", "--fp8"),
    ],
)  # fmt: skip
def test_megatron_lm_spellings(dest: str, name: str, also: str) -> None:
    flag = next(flag for flag in megatron_flags() if flag.dest == dest)
    assert flag.name == name and also in (*flag.on, *flag.off)


@pytest.mark.parametrize(
    ("dest", "reason"),
    [
        ("moe_latent_size", "mixtures of experts"), ("fp8", "fp8"), ("hybrid_context_parallel",
         "context parallelism"),
        ("cuda_graph_impl", "CUDA graphs"), ("multi_latent_attention", "attention"),
         ("use_megatron_fsdp", "FSDP"), ("store_param_remainders", "optimizer"),
        ("moe_input_jitter_eps", "mixtures of experts"), ("fp16", "use --bf16"), ("loss_scale",
         "use --bf16"), ("loss_scale_window", "use --bf16"),
        ("hysteresis", "use --bf16"),
    ],
)  # fmt: skip
def test_fields_that_cannot_work_here_are_refused_with_a_reason(dest: str, reason: str) -> None:
    flag = next(flag for flag in megatron_flags() if flag.dest == dest)
    assert reason in flag.rejection
