"""The expert layers of a Hugging Face mixture-of-experts model, as settings of megatron-core; a
part of `hf_model.py`.

A router that softmaxes over all experts and then renormalises the chosen ones gives the weights of
a softmax over the chosen logits:
`norm_topk_prob` true is megatron-core's order (top-k, then softmax), false is
`moe_router_pre_softmax`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

# Of the training loss of transformers, or of its outputs; here --moe-aux-loss-coeff alone decides.
WITHOUT_EFFECT = frozenset({"router_aux_loss_coef", "output_router_logits"})


class Reader(Protocol):
    """config.json and what is wrong with it; see `hf_model`."""

    config: dict[str, Any]

    def refuse(self, message: str) -> None: ...

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """Where a family's config.json says what about its experts.

    experts: names of the number of experts; files have one of them. ffn: the inner size of one
    expert. norm_topk: key of the switch that renormalises the chosen weights, with its default, or
    None where they always are. dense_layers: whether some layers may be dense (`mlp_only_layers`,
    `decoder_sparse_step`). shared: key of the shared expert's inner size, whose output has a gate,
    or None.
    """

    experts: tuple[str, ...]
    ffn: str
    norm_topk: tuple[str, bool] | None = None
    dense_layers: bool = False
    shared: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Every key of config.json that is read or has no effect here."""
        keys = {*self.experts, self.ffn, "num_experts_per_tok", *WITHOUT_EFFECT}
        keys |= {"mlp_only_layers", "decoder_sparse_step"} if self.dense_layers else set()
        keys |= {key for key in (self.norm_topk and self.norm_topk[0], self.shared) if key}
        return frozenset(keys)


QWEN_MOE = MoeFamily(
    experts=("num_experts", "num_local_experts"),
    ffn="moe_intermediate_size",
    norm_topk=("norm_topk_prob", False),
    dense_layers=True,
)
QWEN2_MOE = MoeFamily(
    experts=QWEN_MOE.experts,
    ffn=QWEN_MOE.ffn,
    norm_topk=QWEN_MOE.norm_topk,
    dense_layers=True,
    shared="shared_expert_intermediate_size",
)
MIXTRAL = MoeFamily(experts=("num_local_experts",), ffn="intermediate_size")


def moe_settings(reader: Reader, family: MoeFamily) -> dict[str, Any]:
    """TransformerConfig's fields about experts. What is unsupported is told to the reader."""
    given = [key for key in family.experts if reader.config.get(key) is not None]
    experts = reader.number((given or family.experts)[0])
    topk = reader.number("num_experts_per_tok")
    if topk > experts:
        reader.refuse(f"num_experts_per_tok {topk} is above the number of experts {experts}")
    normalised = True if family.norm_topk is None else reader.config.get(*family.norm_topk)
    if normalised and topk == 1:
        reader.refuse(
            "num_experts_per_tok 1 with renormalised weights: every weight is 1, and the router would never learn"
        )
    settings = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": reader.number(family.ffn),
        "moe_layer_freq": _layer_pattern(reader) if family.dense_layers else 1,
        "moe_router_pre_softmax": not normalised,
        "moe_router_score_function": "softmax",
    }
    if family.shared is not None:
        settings |= {
            "moe_shared_expert_intermediate_size": reader.number(family.shared),
            "moe_shared_expert_gate": True,
        }
    return settings


def _layer_pattern(reader: Reader) -> int | list[int]:
    """1 for a layer with experts, 0 for a dense one; just 1 when all have experts."""
    layers, step = (
        reader.number("num_hidden_layers"),
        reader.number("decoder_sparse_step", default=1),
    )
    dense = reader.config.get("mlp_only_layers") or []
    pattern = [0 if layer in dense or (layer + 1) % step else 1 for layer in range(layers)]
    if not any(pattern):
        reader.refuse(
            f"mlp_only_layers {dense} and decoder_sparse_step {step} leave no layer with experts"
        )
    return 1 if all(pattern) else pattern


def layer_pattern(words: str) -> int | list[int]:
    """--moe-layer-freq as Megatron-LM reads it: "2", or a list that may be written with + and *, as
    "[0]*3+[1]*45".

    Raises ValueError for anything else.
    """
    legal = (
        'must be a number, or a list of 0 (dense) and 1 (experts) as "[1,0,1]" or "[0]*3+[1]*45"'
    )
    total: list[int] = []
    text = words.replace(" ", "").removeprefix("(").removesuffix(")")
    if text.isdigit() and int(text) > 0:
        return int(text)
    for term in text.split("+"):
        part, star, times = term.partition("*")
        part = part.removeprefix("(")
        inner = part.removeprefix("[").removesuffix("]").split(",")
        if (
            not (part.startswith("[") and part.endswith("]"))
            or not set(inner) <= {"0", "1"}
            or (star and not times.isdigit())
        ):
            raise ValueError(legal)
        total += [int(digit) for digit in inner] * (int(times) if star else 1)
    return 1 if all(total) else total


def moe_layers(freq: int | list[int] | None, num_layers: int) -> list[bool]:
    """Which layers have experts, by megatron-core's `moe_layer_freq`; None: of a model without
    experts."""
    if freq is None:
        return [False] * num_layers
    if isinstance(freq, int):
        return [layer % freq == 0 for layer in range(num_layers)]
    return [bool(mark) for mark in freq]
