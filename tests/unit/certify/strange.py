"""Faults at random layers, positions and experts of several families. This list with its answers
was written from docs/en/certify.md alone, before anyone looked at how certify finds causes; no
fault is one of `planted`. Another `SLIME_LIKE_FAULT_SEED` plants them elsewhere."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.unit.certify.planted import (
    hook,
    layer,
    local_chunk,
    noise,
    rounded,
    swap,
    trainer_layer,
    weight,
)

SEED = os.environ.get("SLIME_LIKE_FAULT_SEED", "1")
LAYERS = 4
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}

Plant = Callable[[Any, "Place"], None]


@dataclass(frozen=True)
class Place:
    """Where a fault is planted."""

    layer: int
    position: int
    expert: int


@dataclass(frozen=True)
class Stranger:
    """A fault and what is right for it.

    Args:
        plant: Changes the model, or in the trainer the backend.
        cause: A regular expression of the cause and its evidence.
        part: Of the layer, or a site without a layer.
        layers: The layers in which it can be.
        expert: Whether the expert is named.
        everywhere: Every one of `layers` has it; the first is named.
        positions: Whether it begins at the position.
        changes: Of config.json.
    """

    name: str
    family: str
    plant: Plant
    cause: str
    part: str
    layers: tuple[int, ...] = tuple(range(LAYERS))
    expert: bool = False
    everywhere: bool = False
    positions: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        drawn = random.Random(f"{SEED} {self.name}")
        index = self.layers[0] if self.everywhere else drawn.choice(self.layers)
        return Place(index, drawn.randrange(3, 50), drawn.randrange(4))

    @property
    def site(self) -> str:
        if self.part in ("embedding", "norm of the model", "logits"):
            return self.part.removesuffix(" of the model")
        return f"layers.{self.place.layer}.{self.part}".removesuffix(".")


def name_of(place: Place, rest: str) -> str:
    return f"model.layers.{place.layer}.{rest}"


def attention(model: Any, place: Place) -> Any:
    return layer(model, place.layer).self_attn


def swap_norms_of_heads(model: Any, place: Place) -> None:
    swap(model, *(name_of(place, f"self_attn.{n}_norm.weight") for n in "qk"))


def instead(module: Any, compute: Callable[..., Any]) -> None:
    module.forward = compute


def other_convention(model: Any, place: Place) -> None:
    """The weight is the factor, not what is added to one."""
    norm = layer(model, place.layer).input_layernorm
    instead(norm, lambda x: norm._norm(x.double()).to(x) * norm.weight)


def with_one_added(model: Any, place: Place) -> None:
    norm = layer(model, place.layer).post_attention_layernorm
    plain = norm.forward
    instead(norm, lambda x: plain(x) / norm.weight * (1 + norm.weight))


def centred(model: Any, place: Place) -> None:
    norm = layer(model, place.layer).input_layernorm
    plain = norm.forward
    instead(norm, lambda x: plain(x - x.mean(-1, keepdim=True)))


def late_positions(model: Any, place: Place) -> None:
    """From a position on, the position is one too large."""

    def shifted(module: Any, args: Any, keywords: Any) -> Any:
        turned = []
        for table in keywords["position_embeddings"]:
            rows = torch.arange(table.size(1))
            rows = (rows + (rows >= place.position)).clamp(max=table.size(1) - 1)
            turned.append(table[:, rows])
        return args, keywords | {"position_embeddings": tuple(turned)}

    attention(model, place).register_forward_pre_hook(shifted, with_kwargs=True)


def old_embedding(model: Any, place: Place) -> None:
    rows = weight(model, "model.embed_tokens.weight")
    rows.add_(noise(rows, 0.02))


def own_head(model: Any, place: Place) -> None:
    """The head is not tied to the embedding any more: it keeps older numbers."""
    old = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(old + noise(old, 0.03))


def pairs_beside(model: Any, place: Place) -> None:
    """Rope turns neighbours, not halves: as if q and k were not reordered by halves."""
    for name in ("q_proj", "k_proj"):
        rows = weight(model, name_of(place, f"self_attn.{name}.weight"))
        size = model.config.head_dim
        heads = rows.view(-1, size // 2, 2, rows.size(1))
        rows.copy_(heads.transpose(1, 2).reshape(rows.shape).clone())


def unscaled_frequencies(model: Any, place: Place) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    steps = torch.arange(frequencies.numel())
    frequencies.copy_(500000.0 ** (-steps / frequencies.numel()))


def delta(model: Any, place: Place) -> Any:
    return layer(model, place.layer).linear_attn


def conv_backwards(model: Any, place: Place) -> None:
    taps = delta(model, place).conv1d.weight.data
    taps.copy_(taps.flip(-1).clone())


def keys_and_values_of_latent(model: Any, place: Place) -> None:
    """The value rows of every head stand before its key rows."""
    rows = weight(model, name_of(place, "self_attn.kv_b_proj.weight"))
    own = attention(model, place)
    heads = rows.view(own.num_heads, -1, rows.size(1))
    keys = heads[:, : own.qk_nope_head_dim]
    values = heads[:, own.qk_nope_head_dim :]
    rows.copy_(torch.cat([values, keys], dim=1).reshape(rows.shape).clone())


def all_groups_of_experts(model: Any, place: Place) -> None:
    gate = layer(model, place.layer).mlp.gate
    gate.topk_group = gate.num_group


def bias_in_the_weights(model: Any, place: Place) -> None:
    """The bias that is for the choice alone is in the weights, too."""
    gate = layer(model, place.layer).mlp.gate

    def biased(module: Any, inputs: Any, output: Any) -> Any:
        logits, _, chosen = output
        weights = (logits.sigmoid() + module.e_score_correction_bias).gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor
        return logits, weights, chosen

    gate.register_forward_hook(biased)


def shared_gate_open(model: Any, place: Place) -> None:
    """The shared expert counts whole."""
    hook(layer(model, place.layer).mlp.shared_expert_gate, lambda logit: torch.full_like(logit, 60))


def transposed_expert(model: Any, place: Place) -> None:
    tensor = weight(model, name_of(place, f"mlp.experts.{place.expert}.down_proj.weight"))
    tensor.copy_(tensor.t().reshape(tensor.shape).clone())


def rows_of_router(model: Any, place: Place) -> None:
    rows = weight(model, name_of(place, "mlp.gate.weight"))
    first = place.expert
    second = (first + 1) % rows.size(0)
    order = list(range(rows.size(0)))
    order[first] = second
    order[second] = first
    rows.copy_(rows[order].clone())


def experts_alpha(model: Any, place: Place) -> None:
    layer(model, place.layer).mlp.experts.alpha = 1.0


def experts_limit(model: Any, place: Place) -> None:
    layer(model, place.layer).mlp.experts.limit = 1e9


def sinks_of_another_layer(model: Any, place: Place) -> None:
    other = (place.layer + 1) % LAYERS
    sinks = weight(model, name_of(place, "self_attn.sinks"))
    sinks.copy_(weight(model, f"model.layers.{other}.self_attn.sinks"))


def masked(change: Callable[[Tensor], Tensor], model: Any, place: Place) -> None:
    """`change` gets the distance of every key from its query, [L, L], and gives what is hidden."""

    def other(module: Any, args: Any, keywords: Any) -> Any:
        hidden = keywords["hidden_states"]
        length = hidden.size(1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = hidden.new_zeros(1, 1, length, length)
        mask = mask.masked_fill(change(distance), torch.finfo(mask.dtype).min)
        return args, keywords | {"attention_mask": mask}

    attention(model, place).register_forward_pre_hook(other, with_kwargs=True)


def wider_window(model: Any, place: Place) -> None:
    width = model.config.sliding_window + 1
    masked(lambda distance: (distance < 0) | (distance >= width), model, place)


def without_first_key(model: Any, place: Place) -> None:
    """The first key is dropped, as a cache that evicts it does; it sees itself."""

    def hidden(distance: Tensor) -> Tensor:
        out = distance < 0
        out[1:, 0] = True
        return out

    masked(hidden, model, place)


def local_base_in_global_layer(model: Any, place: Place) -> None:
    size = model.config.head_dim

    def turned(module: Any, args: Any, keywords: Any) -> Any:
        cosines, sines = keywords["position_embeddings"]
        powers = -torch.arange(0, size, 2).double() / size
        angles = torch.arange(cosines.size(1))[:, None] * 10000.0**powers
        angles = torch.cat([angles, angles], dim=1)[None]
        own = (angles.cos().to(cosines), angles.sin().to(sines))
        return args, keywords | {"position_embeddings": own}

    attention(model, place).register_forward_pre_hook(turned, with_kwargs=True)


def other_cap(model: Any, place: Place) -> None:
    """A cap of 2 in place of 3."""
    hook(model.lm_head, lambda logits: logits)
    model.config.final_logit_softcapping = 2.0


def residual_whole(model: Any, place: Place) -> None:
    layer(model, place.layer).residual_multiplier = 1.0


def skipped(model: Any, place: Place) -> None:
    layer(model, place.layer).register_forward_hook(lambda module, inputs, output: inputs[0])


def mlp_in_half(model: Any, place: Place) -> None:
    mlp = layer(model, place.layer).mlp
    plain = mlp.forward

    def low(hidden: Tensor) -> Tensor:
        saved = [(p, p.data.clone()) for p in mlp.parameters()]
        for parameter, _ in saved:
            rounded(parameter.data, torch.float16)
        out = plain(hidden.half().to(hidden)).half().to(hidden)
        for parameter, value in saved:
            parameter.data.copy_(value)
        return out

    instead(mlp, low)


def norm_in_bfloat16(model: Any, place: Place) -> None:
    norm = layer(model, place.layer).input_layernorm
    plain = norm.forward
    instead(norm, lambda x: plain(x.bfloat16().to(x)).bfloat16().to(x))


def heads_share_others_keys(model: Any, place: Place) -> None:
    """Head i reads keys and values i modulo their number, not those of its group."""
    own = attention(model, place)
    size = own.head_dim
    keys = own.k_proj.weight.size(0) // size
    order = torch.arange(keys * own.num_key_value_groups).view(-1, keys).t().flatten()
    # the same numbers as with the query rows and the columns of the output in another order
    rows = torch.cat([torch.arange(h * size, h * size + size) for h in order.tolist()])
    own.q_proj.register_forward_hook(lambda module, inputs, output: output[..., rows])
    back = torch.empty_like(rows)
    back[rows] = torch.arange(rows.numel())
    own.o_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0][..., back],))


def expert_of_the_next_layer(model: Any, place: Place) -> None:
    other = (place.layer + 1) % LAYERS
    for part in ("gate_proj", "up_proj", "down_proj"):
        rest = f"mlp.experts.{place.expert}.{part}.weight"
        target = weight(model, name_of(place, rest))
        target.copy_(weight(model, f"model.layers.{other}.{rest}"))


def query_bias_twice(model: Any, place: Place) -> None:
    attention(model, place).q_proj.bias.data.mul_(2)


def keys_through_sigmoid(model: Any, place: Place) -> None:
    """The delta net's step (beta) is not bent by a sigmoid: all of every key is written."""
    own = delta(model, place)
    plain = own.fix_query_key_value_ordering

    def whole(*args: Any) -> Any:
        query, key, value, z, b, a = plain(*args)
        return query, key, value, z, torch.full_like(b, 60.0), a

    own.fix_query_key_value_ordering = whole


def half_an_adapter(model: Any, place: Place) -> None:
    """See the test: the reference has base + update, this one base + update / 2."""
    tensor = weight(model, name_of(place, "mlp.up_proj.weight"))
    tensor.sub_(0.5 * adapter_update(tensor))


def adapter_update(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    b = torch.randn(like.size(0), 3, generator=generator)
    return 0.02 * b @ torch.randn(3, like.size(1), generator=generator)


def memory(model: Any, place: Place) -> Any:
    return layer(model, place.layer).ple


def other_hash(model: Any, place: Place) -> None:
    """The numbers of n-grams are multiplied with those of another seed."""
    embedding = memory(model, place).ple_embedding
    embedding.layer_multipliers.copy_(embedding.layer_multipliers.roll(1))


def older_rows_of_memory(model: Any, place: Place) -> None:
    rows = memory(model, place).ple_embedding.ngram_embedding.weight.data
    rows.add_(noise(rows, 0.05))


def narrow_memory(model: Any, place: Place) -> None:
    """The convolution of the memory reads neighbours, not every third token."""
    module = memory(model, place)
    module.conv1d.dilation = (1,)
    module.short_conv_state_len = module.conv1d.kernel_size[0] - 1


def stale_injection(model: Any, place: Place) -> None:
    rows = layer(model, place.layer).attn_hyper_connection.block_inject_weight.weight.data
    rows.mul_(1.5)


def mixer_left_stale(model: Any, place: Place) -> None:
    rows = model.model.hyper_connection_mixer.input_mix_weight_up.weight.data
    rows.add_(noise(rows, 0.05))


HALF_AN_ADAPTER = "adapter with half its scale"
FULL = (1, 3)  # of Qwen3-Next and Gemma with a pattern of 2
LINEAR = (0, 2)
DENSE = "Qwen3ForCausalLM"
LLAMA = "LlamaForCausalLM"
EXPERTS = "Qwen3MoeForCausalLM"
ALL_EXPERTS: dict[str, Any] = {"mlp_only_layers": []}
NEXT = "Qwen3NextForCausalLM"
LATENT = "DeepseekV3ForCausalLM"
SPARSE = (1, 2, 3)
SINKS = "GptOssForCausalLM"
FLASH = "Qwen4ExpForCausalLM"
GEMMA: dict[str, Any] = {"sliding_window_pattern": 2}

ENGINE_FAULTS = (
    Stranger("norms of queries and keys swapped", DENSE, swap_norms_of_heads, "swapped weights.*_norm", "attention"),
    Stranger("norm around zero, computed around nothing", NEXT, other_convention, "norm around zero|around one", "norm"),
    Stranger("one added to a norm's weight", LLAMA, with_one_added, "norm around zero|around one", "mlp_norm"),
    Stranger("a norm that subtracts the mean", LLAMA, centred, "(?i)mean|layernorm", "norm"),
    Stranger("positions one too large from a position on", DENSE, late_positions, "position", "attention", positions=True),
    Stranger("embedding of an older version", LLAMA, old_embedding, "stale|different weights", "embedding"),
    Stranger("tied head broken", DENSE, own_head, "tied|stale|different weights", "logits", changes={"tie_word_embeddings": True}),
    Stranger(HALF_AN_ADAPTER, DENSE, half_an_adapter, "adapter merged a wrong number of times.*0.5 times", "mlp"),
    Stranger("rope of neighbours in one layer", LLAMA, pairs_beside, "rope layout|another order", "attention"),
    Stranger("rope scaling of Llama 3 dropped", LLAMA, unscaled_frequencies, "rope scaling", "attention", everywhere=True, changes={"rope_parameters": LLAMA3}),
    Stranger("convolution backwards in time", NEXT, conv_backwards, "conv1d", "attention", layers=LINEAR),
    Stranger("dt_bias dropped", NEXT, lambda m, p: delta(m, p).dt_bias.data.zero_(), "missing weights.*dt_bias", "attention", layers=LINEAR),
    Stranger("A_log in bfloat16", NEXT, lambda m, p: rounded(delta(m, p).A_log.data, torch.bfloat16), "dtype.*A_log.*bfloat16", "attention", layers=LINEAR),
    Stranger("gate of the delta net is a sigmoid", NEXT, lambda m, p: setattr(delta(m, p).norm, "activation", "sigmoid"), "activation function.*sigmoid", "attention", layers=LINEAR),
    Stranger("the delta net writes all of every key", NEXT, keys_through_sigmoid, "unknown|beta|in_proj_ba", "attention", layers=LINEAR),
    Stranger("keys and values of the latent swapped", LATENT, keys_and_values_of_latent, "another order.*kv_b_proj", "attention"),
    Stranger("norm of the latent left out", LATENT, lambda m, p: instead(attention(m, p).kv_a_layernorm, lambda x: x), "part left out.*kv_a_layernorm", "attention"),
    Stranger("scale of YaRN in the softmax of MLA", LATENT, lambda m, p: setattr(attention(m, p), "scaling", attention(m, p).scaling * 1.37**2), "softmax scale.*1.87|softmax scale", "attention"),
    Stranger("factor of routed experts left out", LATENT, lambda m, p: setattr(layer(m, p.layer).mlp.gate, "routed_scaling_factor", 1.0), "wrong scale.*0.588", "router", layers=SPARSE),
    Stranger("groups of experts ignored", LATENT, all_groups_of_experts, "group", "router", layers=SPARSE),
    Stranger("the bias of the choice is in the weights", LATENT, bias_in_the_weights, "bias", "router", layers=SPARSE),
    Stranger("shared expert without its gate", "Qwen2MoeForCausalLM", shared_gate_open, "shared_expert_gate", "mlp", layers=FULL),
    Stranger("an expert's matrix transposed", EXPERTS, transposed_expert, "transposed weight.*down_proj", "mlp", expert=True, changes=ALL_EXPERTS),
    Stranger("an expert of the next layer", EXPERTS, expert_of_the_next_layer, "swapped weights.*experts", "mlp", expert=True, changes=ALL_EXPERTS),
    Stranger("two rows of the router swapped", EXPERTS, rows_of_router, "another order.*gate|swapped.*gate", "router", changes=ALL_EXPERTS),
    Stranger("slope of the experts' gate", SINKS, experts_alpha, "activation function|alpha", "mlp"),
    Stranger("no limit of the experts' gate", SINKS, experts_limit, "activation function|limit", "mlp"),
    Stranger("sinks of another layer", SINKS, sinks_of_another_layer, "swapped weights.*sinks", "attention"),
    Stranger("window one too wide", "MinistralForCausalLM", wider_window, "attention window.*of 7", "attention"),
    Stranger("the first key is dropped", DENSE, without_first_key, "unknown|window|key", "attention"),
    Stranger("local rope base in a global layer", "Gemma3ForCausalLM", local_base_in_global_layer, "rope", "attention", layers=FULL, changes=GEMMA),
    Stranger("another cap of logits", "Gemma4ForCausalLM", other_cap, "logit cap", "logits"),
    Stranger("residual multiplier dropped", "GraniteForCausalLM", residual_whole, "residual", "mlp_norm"),
    Stranger("a layer skipped", LLAMA, skipped, "(part|layer).*(left out|skipped)", ""),
    Stranger("MLP in float16", LLAMA, mlp_in_half, "dtype.*float16", "mlp"),
    Stranger("norm in bfloat16", DENSE, norm_in_bfloat16, "dtype.*bfloat16", "norm"),
    Stranger("heads with the keys of another group", DENSE, heads_share_others_keys, "heads|group", "attention"),
    Stranger("bias of queries twice", "Qwen2ForCausalLM", query_bias_twice, "wrong scale.*q_proj.bias.*2 times", "attention"),
    Stranger("memory of n-grams left out", FLASH, lambda m, p: hook(memory(m, p), torch.zeros_like), "part left out.*memory", "memory", layers=LINEAR),
    Stranger("another hash of n-grams", FLASH, other_hash, "unknown|hash", "memory", layers=LINEAR),
    Stranger("older rows of the memory", FLASH, older_rows_of_memory, "different weights.*ngram_embedding|stale", "memory", layers=LINEAR),
    Stranger("memory without gaps", FLASH, narrow_memory, "unknown|dilation", "memory", layers=LINEAR),
    Stranger("norm of the memory's keys left out", FLASH, lambda m, p: instead(memory(m, p).norm_key, lambda x: x), "part left out.*norm_key", "memory", layers=LINEAR),
    Stranger("injection of attention scaled", FLASH, stale_injection, "wrong scale.*block_inject_weight.*1.5", "mlp_streams"),
    Stranger("mixer of the streams older", FLASH, mixer_left_stale, "different weights.*hyper_connection_mixer", "norm of the model"),
    Stranger("epsilon of the streams' norm", FLASH, lambda m, p: setattr(layer(m, p.layer).mlp_hyper_connection.hc_norm, "eps", 1e-3), "norm epsilon.*0.001", "mlp_streams"),
)  # fmt: skip


def own_norm(backend: Any, place: Place) -> None:
    trainer_layer(backend, place.layer).self_attention.k_layernorm.eps = 1e-3


def own_router_bias(backend: Any, place: Place) -> None:
    trainer_layer(backend, place.layer).mlp.router.expert_bias.zero_()


def own_softmax_scale(backend: Any, place: Place) -> None:
    core = trainer_layer(backend, place.layer).self_attention.core_attention
    core.softmax_scale = core.softmax_scale * 0.8


def own_embedding(backend: Any, place: Place) -> None:
    local_chunk(backend).embedding.register_forward_hook(
        lambda module, inputs, output: output * 1.5
    )


def own_dt_bias(backend: Any, place: Place) -> None:
    trainer_layer(backend, place.layer).self_attention.dt_bias.data.zero_()


def own_shared_expert(backend: Any, place: Place) -> None:
    trainer_layer(backend, place.layer).mlp.shared_experts.linear_fc2.weight.data.mul_(0.25)


def own_final_norm(backend: Any, place: Place) -> None:
    local_chunk(backend).decoder.final_layernorm.weight.data.fill_(1.0)


def own_head_rows(backend: Any, place: Place) -> None:
    rows = local_chunk(backend).output_layer.weight.data
    rows.copy_(rows.roll(1, 0).clone())


def own_layer_skipped(backend: Any, place: Place) -> None:
    def unchanged(module: Any, args: Any, keywords: Any, output: Any) -> Any:
        hidden = args[0] if args else keywords["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    trainer_layer(backend, place.layer).register_forward_hook(unchanged, with_kwargs=True)


def own_attention_doubled(backend: Any, place: Place) -> None:
    def more(module: Any, inputs: Any, output: Any) -> Any:
        return functional.gelu(output[0]), output[1]

    trainer_layer(backend, place.layer).self_attention.register_forward_hook(more)


def own_table(backend: Any, place: Place) -> None:
    rows = trainer_layer(backend, place.layer).ngram_memory.table.weight.data
    rows.copy_(rows.roll(1, 0).clone())


def own_memory_left_out(backend: Any, place: Place) -> None:
    hook(trainer_layer(backend, place.layer).ngram_memory, torch.zeros_like)


TRAINER_FAULTS = (
    Stranger("epsilon of the keys' norm", DENSE, own_norm, "norm epsilon.*0.001", "attention"),
    Stranger("bias of experts dropped", LATENT, own_router_bias, "missing weights.*e_score_correction_bias", "router", layers=SPARSE),
    Stranger("softmax scale", LLAMA, own_softmax_scale, "softmax scale.*is 0.282", "attention"),
    Stranger("embedding times a factor", LLAMA, own_embedding, "wrong scale.*1.5 times", "embedding"),
    Stranger("dt_bias dropped", NEXT, own_dt_bias, "missing weights.*dt_bias", "attention", layers=LINEAR),
    Stranger("shared expert's last matrix scaled", LATENT, own_shared_expert, "wrong scale.*shared_experts", "mlp", layers=SPARSE),
    Stranger("final norm never loaded", LLAMA, own_final_norm, "missing weights.*norm.weight", "norm of the model"),
    Stranger("rows of the head moved by one", DENSE, own_head_rows, "lm_head.*another (order|place)", "logits"),
    Stranger("a layer skipped", DENSE, own_layer_skipped, "(part|layer).*(left out|skipped)", ""),
    Stranger("attention bent by a function", LLAMA, own_attention_doubled, "unknown|function", "attention"),
    Stranger("rows of the memory moved by one", FLASH, own_table, "ngram_embedding.*another (order|place)", "memory", layers=LINEAR),
    Stranger("memory of n-grams left out", FLASH, own_memory_left_out, "part left out.*memory", "memory", layers=LINEAR),
)  # fmt: skip
