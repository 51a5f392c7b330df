"""Workers of tests/dist/test_convert.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import megatron_patches
from arguments.hf.model import HfModel, read_hf_model
from arguments.megatron_configs import activation_function, transformer_config_type
from arguments.schema import GPTModelConfig

megatron_patches.apply()

from benchmarks.parity.steps import parallel  # noqa: E402
from slime_like.images.settings import VisionSettings  # noqa: E402
from slime_like.megatron.model.gpt import build_chunks  # noqa: E402
from slime_like.megatron.model.policy import head_weight  # noqa: E402
from slime_like.megatron.ops.attention import packed_rows  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.weights import parameter_map  # noqa: E402
from slime_like.weights.hf_export import HfExport  # noqa: E402
from slime_like.weights.hf_import import load_hf_weights  # noqa: E402
from slime_like.weights.hf_save import save_hf  # noqa: E402

# Both sides of a comparison with transformers round, in orders of summation that differ by
# processor, thread count and layout. A weight in the wrong place costs about 1e5 times one
# process's rounding.
ROUNDINGS = 20.0


RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def build(
    folder: str,
    layout: ParallelLayout,
    dtype: torch.dtype = torch.float32,
    *,
    value_head: bool = False,
    predicting: int | None = None,
    vision: VisionSettings | None = None,
    model_base: str = "auto",
    recompute: bool = False,
) -> tuple[list[Any], HfModel, GPTModelConfig]:
    """This rank's chunks for the model in `folder`, with random weights. The padding fits no
    vocabulary used here."""
    hf = read_hf_model(folder, value_head=value_head)
    gpt = GPTModelConfig(
        **hf.gpt,
        make_vocab_size_divisible_by=32,
        mtp_num_layers=predicting,
        vision=vision,
        model_base=model_base,
    )
    config = transformer_config_type(hf.transformer)(
        **{
            **hf.transformer,
            "activation_func": activation_function(hf.transformer["activation_func"]),
        },
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vp_size if layout.vp_size > 1 else None,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        moe_token_dispatcher_type="alltoall",
        transformer_impl="local",
        pipeline_dtype=dtype,
        params_dtype=dtype,
        **(RECOMPUTE if recompute else {}),
    )
    return (
        [
            chunk.to(dtype).eval()
            for chunk in build_chunks(config, gpt, "local", layout, value_head=value_head)
        ],
        hf,
        gpt,
    )


@torch.no_grad()
def logits_of(
    chunks: list[Any], tokens: Tensor, layout: ParallelLayout, vocab_size: int
) -> Tensor | None:
    """[T, vocab] of one sequence `tokens` [T], on the last stage. Stages take turns; no schedule is
    involved."""
    rows = packed_rows(torch.tensor([0, tokens.numel()], dtype=torch.int32))
    positions = torch.arange(tokens.numel())[None]
    hidden = torch.empty(
        tokens.numel(), 1, chunks[0].config.hidden_size, dtype=next(chunks[0].parameters()).dtype
    )
    peers = dist.get_process_group_ranks(layout.pp_group)
    out: Tensor | None = None
    for turn in range(layout.vp_size * layout.pp_size):
        stage = turn % layout.pp_size
        if stage == layout.pp_rank:
            if turn > 0 and layout.pp_size > 1:
                dist.recv(hidden, src=peers[(stage - 1) % layout.pp_size])
                chunks[turn // layout.pp_size].set_input_tensor([hidden])
            out = chunks[turn // layout.pp_size](
                tokens[None], positions, None, packed_seq_params=rows
            )
            if turn + 1 < layout.vp_size * layout.pp_size:
                dist.send(out.contiguous(), dst=peers[(stage + 1) % layout.pp_size])
                out = None
    if out is None:
        return None
    if layout.is_last_stage:  # the policy's chunk ends at hidden states
        out = out @ head_weight(chunks[-1]).t()
    shards = [torch.empty_like(out) for _ in range(layout.tp_size)]
    dist.all_gather(shards, out.contiguous(), group=layout.tp_group)
    return torch.cat(shards, dim=-1)[0, :, :vocab_size]


def stored_weights(folder: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        weights.update(load_file(path))
    return weights


def in_float64(chunks: list[Any]) -> list[Any]:
    """The same chunks, computing in float64 from now on."""
    for chunk in chunks:
        chunk.config.params_dtype = chunk.config.pipeline_dtype = torch.float64
        if chunk.config.num_moe_experts is not None:
            chunk.config.moe_router_dtype = "fp64"
        chunk.double()
    return chunks


@dataclasses.dataclass(frozen=True)
class SingleProcess:
    """What one process computes."""

    logits: Tensor  # [T, vocab] in float64
    # how far its float32 logits are from them, the size of error that any order of summation may
    # have
    rounding: float


def single_process(folder: str) -> SingleProcess:
    tokens = torch.load(Path(folder) / "expected.pt")["tokens"]
    with parallel() as layout:
        chunks, hf, gpt = build(folder, layout)
        load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
        size = hf.gpt["vocab_size"]
        single = logits_of(chunks, tokens, layout, size)
        exact = logits_of(in_float64(chunks), tokens, layout, size)
    assert single is not None and exact is not None
    return SingleProcess(exact, (single - exact).abs().max().item())


def check_layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """For every layout and model: load, compare logits, export, compare bit by bit.

    Returns: by case, the largest difference of the float32 logits from transformers' in units of
    one process's rounding ("transformers"), and of the float64 logits from one process's
    ("float64").
    """
    found: dict[str, dict[str, float]] = {"transformers": {}, "float64": {}}
    singles = {folder: single_process(folder) for folder in arguments["folders"]}
    for sizes in arguments["layouts"]:
        with parallel(*sizes) as layout:
            for folder, single in singles.items():
                case = f"{Path(folder).name} {layout.describe()}"
                chunks, hf, gpt = build(folder, layout)
                load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
                expected = torch.load(Path(folder) / "expected.pt")
                logits = logits_of(chunks, expected["tokens"], layout, hf.gpt["vocab_size"])
                if logits is not None:
                    apart = (logits - expected["logits"]).abs().max().item()
                    found["transformers"][case] = apart / single.rounding
                exported = list(HfExport(chunks, hf=hf, gpt=gpt, layout=layout).stream())
                stored = stored_weights(folder)
                assert len(exported) == len(stored), case
                assert {name for name, _ in exported} == set(stored), case
                assert all(torch.equal(tensor, stored[name]) for name, tensor in exported), case
                own = {parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()}
                assert not own & {tensor.data_ptr() for _, tensor in exported}, (
                    f"{case}: exported tensors must not alias parameters"
                )
                if Path(folder).name == arguments.get("grouped"):
                    check_names_of_transformer_engine(
                        chunks, folder, exported, hf=hf, gpt=gpt, layout=layout
                    )
                logits = logits_of(
                    in_float64(chunks), expected["tokens"], layout, hf.gpt["vocab_size"]
                )
                if logits is not None:
                    found["float64"][case] = (logits - single.logits).abs().max().item()
    return found


def over_the_limit(ranks: list[dict[str, dict[str, float]]], cases: int) -> dict[str, float]:
    """The cases of `check_layouts` on all ranks that are further apart than rounding explains."""
    over: dict[str, float] = {}
    for kind, limit in (("transformers", ROUNDINGS), ("float64", 1e-11)):
        values = {case: value for rank in ranks for case, value in rank[kind].items()}
        assert len(values) == cases
        over |= {f"{kind}: {case}": v for case, v in values.items() if not v <= limit}
    return over


def check_names_of_transformer_engine(
    chunks: list[Any], folder: str, expected: list[tuple[str, Tensor]], **model: Any
) -> None:
    """Loading and exporting when parameters have the names of grouped experts, a numbered one for
    each of the rank's, and of fused norms."""
    renamed = 0

    def named_weights(chunk: Any) -> Iterator[tuple[str, Tensor]]:
        nonlocal renamed
        for name, weight in families_named_weights(chunk):
            other = re.sub(
                r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name
            )
            other = re.sub(
                r"\.input_layernorm\.weight$", ".self_attention.linear_qkv.layer_norm_weight", other
            )
            renamed += other != name
            yield other, weight

    families_named_weights = parameter_map.named_weights
    with mock.patch.object(parameter_map, "named_weights", named_weights):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()
        load_hf_weights(chunks, folder, **model)
        found = list(HfExport(chunks, **model).stream())
    assert renamed > 0
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected))


def check_half_precision(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """fp32 file -> bf16 model -> bf16 and fp32 streams."""
    folder = arguments["folder"]
    with parallel(2, 2) as layout:
        chunks, hf, gpt = build(folder, layout, torch.bfloat16)
        load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
        stored = {name: tensor.bfloat16() for name, tensor in stored_weights(folder).items()}
        for name, tensor in HfExport(chunks, hf=hf, gpt=gpt, layout=layout).stream():
            assert torch.equal(tensor, stored[name]), name
            assert tensor.dtype == torch.bfloat16
        for name, tensor in HfExport(
            chunks, hf=hf, gpt=gpt, layout=layout, dtype=torch.float32
        ).stream():
            assert torch.equal(tensor, stored[name].float()), name
            assert tensor.dtype == torch.float32
    return sorted(stored)


def check_saving(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """Save from TP2 PP2 twice over, then into a folder that must not be touched; the messages that
    this rank saw."""
    folder, out, taken = arguments["folder"], arguments["out"], arguments["taken"]
    seen = []
    with parallel(2, 2) as layout:
        chunks, hf, gpt = build(folder, layout)
        load_hf_weights(chunks, folder, hf=hf, gpt=gpt, layout=layout)
        for target in (out, out, taken, folder):
            try:
                save_hf(
                    target,
                    HfExport(chunks, hf=hf, gpt=gpt, layout=layout).stream(),
                    folder,
                    max_shard_bytes=20_000,
                )
            except ValueError as error:
                seen.append(str(error))
    return seen


def check_all(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One launch for everything that needs four processes."""
    return {
        "logits": check_layouts(rank, world_size, arguments),
        "names": check_half_precision(rank, world_size, {"folder": arguments["folders"][0]}),
        "errors": check_saving(rank, world_size, {**arguments, "folder": arguments["folders"][0]}),
    }
