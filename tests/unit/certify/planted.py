"""Faults that are planted in an engine's model or in the trainer, with what must be named. Nothing
in `slime_like.certify` refers to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.engines.local.weight_loader import WeightSlots

DENSE = "Qwen3ForCausalLM"
EXPERTS = "Qwen3MoeForCausalLM"
BIASED = "Glm4MoeForCausalLM"
WINDOWS = "MinistralForCausalLM"
SINKS = "GptOssForCausalLM"


@dataclass(frozen=True)
class Fault:
    """A fault, and the causes and the site that are right for it."""

    name: str
    family: str
    plant: Callable[[Any], None]  # changes the model
    cause: str
    site: str
    expert: int | None = None
    says: str = ""  # what the evidence must contain


def weight(model: Any, name: str) -> Tensor:
    return WeightSlots(model).tensors[name].data


def layer(model: Any, index: int) -> Any:
    return model.model.layers[index]


def epsilon(model: Any, path: str, factor: float) -> None:
    norm = model.get_submodule(path)
    norm.variance_epsilon = norm.variance_epsilon * factor


def rope_base(model: Any) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    steps = torch.arange(frequencies.numel())
    frequencies.copy_(250000.0 ** (-steps / frequencies.numel()))


def rope_factor(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def rope_off_in_one_layer(model: Any) -> None:
    def unturned(module: Any, args: Any, keywords: Any) -> Any:
        cosines, sines = keywords["position_embeddings"]
        return args, keywords | {
            "position_embeddings": (torch.ones_like(cosines), torch.zeros_like(sines))
        }

    layer(model, 1).register_forward_pre_hook(unturned, with_kwargs=True)


def swapped_heads(model: Any) -> None:
    rows = weight(model, "model.layers.1.self_attn.q_proj.weight")
    size = model.config.head_dim
    rows.copy_(torch.cat([rows[size : 2 * size], rows[:size], rows[2 * size :]]))


def swap(model: Any, a: str, b: str) -> None:
    first = weight(model, a)
    second = weight(model, b)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def swap_experts(model: Any, index: int, a: int, b: int) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        swap(model, *(f"model.layers.{index}.mlp.experts.{e}.{part}.weight" for e in (a, b)))


def swap_layers(model: Any) -> None:
    for name in WeightSlots(model).tensors:
        if ".layers.0." in name:
            swap(model, name, name.replace(".layers.0.", ".layers.1."))


def noise(tensor: Tensor, share: float, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return share * tensor.std() * torch.randn(tensor.shape, generator=generator)


def transpose(tensor: Tensor) -> None:
    """The numbers in the order of the transposed matrix, in the shape of this one."""
    tensor.copy_(tensor.t().reshape(tensor.shape).clone())


def stale(model: Any) -> None:
    """Layer 1 missed an update: all of its weights are a little different."""
    for seed, (name, tensor) in enumerate(WeightSlots(model).tensors.items()):
        if ".layers.1." in name:
            tensor.data.add_(noise(tensor, 0.05, seed) if tensor.dim() > 1 else 1e-3)


def adapter(model: Any) -> None:
    tensor = weight(model, "model.layers.0.self_attn.q_proj.weight")
    generator = torch.Generator().manual_seed(7)
    b = torch.randn(tensor.size(0), 2, generator=generator)
    a = torch.randn(2, tensor.size(1), generator=generator)
    tensor.add_(0.01 * b @ a)


def rounded(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.copy_(tensor.to(dtype).to(tensor))


def int8(tensor: Tensor) -> None:
    scale = tensor.abs().amax(dim=1, keepdim=True) / 127
    tensor.copy_((tensor / scale).round() * scale)


def fp8_by_row(tensor: Tensor) -> None:
    scale = tensor.abs().amax(dim=1, keepdim=True) / 448
    tensor.copy_((tensor / scale).to(torch.float8_e4m3fn).to(tensor) * scale)


def activation(model: Any) -> None:
    layer(model, 1).mlp.act_fn = torch.nn.GELU()


def output_times(module: torch.nn.Module, factor: float) -> None:
    def scaled(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * factor, *output[1:])
        return output * factor

    module.register_forward_hook(scaled)


def in_bfloat16(module: torch.nn.Module) -> None:
    """The module computes with rounded inputs and weights."""
    inner = module.forward

    def lower(*args: Any, **keywords: Any) -> Any:
        saved = [(p, p.data.clone()) for p in module.parameters()]
        for parameter, _ in saved:
            rounded(parameter.data, torch.bfloat16)
        low = [a.bfloat16().to(a) if isinstance(a, Tensor) else a for a in args]
        if "hidden_states" in keywords:
            hidden = keywords["hidden_states"]
            keywords = keywords | {"hidden_states": hidden.bfloat16().to(hidden)}
        out = inner(*low, **keywords)
        for parameter, value in saved:
            parameter.data.copy_(value)
        if isinstance(out, tuple):
            return tuple(
                o.bfloat16().to(o) if isinstance(o, Tensor) and o.is_floating_point() else o
                for o in out
            )
        return out.bfloat16().to(out)

    module.forward = lower  # type: ignore[method-assign]


def normalises_experts(model: Any) -> None:
    gate = layer(model, 0).mlp.gate
    gate.norm_topk_prob = not gate.norm_topk_prob


def reversed_weights(model: Any) -> None:
    def turn(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = inputs
        return hidden, chosen, weights.flip(-1)

    layer(model, 0).mlp.experts.register_forward_pre_hook(turn)


def one_expert_fewer(model: Any) -> None:
    def cut(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = inputs
        return hidden, chosen[:, :-1], weights[:, :-1]

    layer(model, 0).mlp.experts.register_forward_pre_hook(cut)


def router_times(model: Any) -> None:
    def more(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[0], inputs[1], inputs[2] * 2.5

    layer(model, 0).mlp.experts.register_forward_pre_hook(more)


def with_mask(model: Any, width: int | None) -> None:
    """Every layer sees the last `width` keys."""

    def other(module: Any, args: Any, keywords: Any) -> Any:
        length = args[0].size(1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if width is not None:
            hidden |= distance >= width
        mask = args[0].new_zeros(1, 1, length, length)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return args, keywords | {"attention_mask": mask}

    layer(model, 0).self_attn.register_forward_pre_hook(other_of_keywords(other), with_kwargs=True)


def other_of_keywords(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, args: Any, keywords: Any) -> Any:
        hidden = args[0] if args else keywords["hidden_states"]
        _, changed = hook(module, (hidden,), keywords)
        return args, changed

    return call


def no_sinks(model: Any) -> None:
    sinks = layer(model, 1).self_attn.sinks
    sinks.data.fill_(-1e30)


def sinks_zero(model: Any) -> None:
    layer(model, 0).self_attn.sinks.data.zero_()


def hook(module: torch.nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda module, inputs, output: change(output))


def part_of_rope(model: Any) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    frequencies[frequencies.numel() // 2 :] = 0


def every_epsilon(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3


def sigmoid_router(model: Any) -> None:
    def score(module: Any, inputs: Any, output: Any) -> Any:
        weights, chosen = output[0].sigmoid().topk(module.top_k, -1)
        return output[0], weights / weights.sum(-1, keepdim=True), chosen

    layer(model, 0).mlp.gate.register_forward_hook(score)


def without_query_norm(model: Any) -> None:
    layer(model, 1).self_attn.q_norm = torch.nn.Identity()


ATTENTION = "model.layers.{}.self_attn.{}.weight"
MLP = "model.layers.{}.mlp.{}.weight"
FAULTS = (
    Fault("epsilon of a norm", DENSE,
        lambda m: epsilon(m, "model.layers.1.input_layernorm", 30), "norm epsilon", "layers.1.norm", says="3e-05"),
    Fault("epsilon of the norm before the MLP", DENSE,
        lambda m: epsilon(m, "model.layers.0.post_attention_layernorm", 0.1), "norm epsilon", "layers.0.mlp_norm", says="1e-07"),
    Fault("epsilon of the query norm", DENSE,
        lambda m: epsilon(m, "model.layers.0.self_attn.q_norm", 1000), "norm epsilon", "layers.0.attention", says="q_norm is 0.001"),
    Fault("epsilon of the final norm", DENSE,
        lambda m: epsilon(m, "model.norm", 100), "norm epsilon", "norm", says="0.0001"),
    Fault("rope base", DENSE, rope_base, "rope base", "layers.0.attention", says="250000"),
    Fault("rope scaling", DENSE, rope_factor, "rope scaling", "layers.0.attention", says="0.5"),
    Fault("rope left out in a layer", DENSE, rope_off_in_one_layer, "rope", "layers.1.attention", says="no rope"),
    Fault("query heads swapped", DENSE, swapped_heads, "heads in another order", "layers.1.attention", says="blocks of"),
    Fault("gate and up swapped", DENSE,
        lambda m: swap(m, MLP.format(0, "gate_proj"), MLP.format(0, "up_proj")), "swapped weights", "layers.0.mlp", says="up_proj"),
    Fault("keys and values swapped", DENSE,
        lambda m: swap(m, ATTENTION.format(1, "k_proj"), ATTENTION.format(1, "v_proj")), "swapped weights", "layers.1.attention", says="v_proj"),
    Fault("transposed weight", DENSE,
        lambda m: transpose(weight(m, ATTENTION.format(0, "o_proj"))), "transposed weight", "layers.0.attention", says="o_proj"),
    Fault("weight never loaded", DENSE,
        lambda m: weight(m, MLP.format(1, "down_proj")).zero_(), "missing weights", "layers.1.mlp", says="down_proj"),
    Fault("norm weight never loaded", DENSE,
        lambda m: weight(m, "model.layers.1.input_layernorm.weight").fill_(1.0), "missing weights", "layers.1.norm", says="input_layernorm"),
    Fault("stale layer", DENSE, stale, "stale layer", "layers.1.norm"),
    Fault("layers swapped", DENSE, swap_layers, "swapped weights", "layers.0.norm", says="layers.1."),
    Fault("adapter merged twice", DENSE, adapter, "adapter", "layers.0.attention", says="rank 2"),
    Fault("weight scaled", DENSE,
        lambda m: weight(m, ATTENTION.format(1, "v_proj")).mul_(1.01), "wrong scale", "layers.1.attention", says="1.01"),
    Fault("weight in bfloat16", DENSE,
        lambda m: rounded(weight(m, MLP.format(0, "up_proj")), torch.bfloat16), "dtype", "layers.0.mlp", says="bfloat16"),
    Fault("weight in int8", DENSE, lambda m: int8(weight(m, MLP.format(0, "down_proj"))), "quantisation", "layers.0.mlp", says="int8"),
    Fault("weight in fp8", DENSE,
        lambda m: fp8_by_row(weight(m, ATTENTION.format(0, "q_proj"))), "quantisation", "layers.0.attention", says="fp8"),
    Fault("softmax scale", DENSE,
        lambda m: setattr(layer(m, 1).self_attn, "scaling", layer(m, 1).self_attn.scaling * 1.3), "softmax scale", "layers.1.attention"),
    Fault("activation", DENSE, activation, "activation function", "layers.1.mlp", says="gelu"),
    Fault("attention times a factor", DENSE, lambda m: output_times(layer(m, 0).self_attn, 1.02), "wrong scale", "layers.0.attention", says="1.02"),
    Fault("attention in bfloat16", DENSE, lambda m: in_bfloat16(layer(m, 1).self_attn), "dtype", "layers.1.attention", says="bfloat16"),
    Fault("embedding times a factor", DENSE, lambda m: output_times(m.model.embed_tokens, 5.0), "wrong scale", "embedding", says="5 times"),
    Fault("a row of the embedding", DENSE,
        lambda m: weight(m, "model.embed_tokens.weight")[17].mul_(2), "different weights", "embedding", says="17 first"),
    Fault("logits divided", DENSE, lambda m: output_times(m.lm_head, 1 / 0.7), "temperature", "logits", says="1.42857"),
    Fault("head is the embedding", DENSE,
        lambda m: weight(m, "lm_head.weight").copy_(weight(m, "model.embed_tokens.weight")), "swapped weights", "logits", says="embed_tokens"),
    Fault("experts swapped", EXPERTS, lambda m: swap_experts(m, 0, 1, 2), "swapped weights", "layers.0.mlp", expert=1),
    Fault("one expert rounded", EXPERTS,
        lambda m: rounded(weight(m, "model.layers.0.mlp.experts.3.up_proj.weight"), torch.bfloat16), "dtype", "layers.0.mlp", expert=3),
    Fault("weights of experts not normalised", EXPERTS, normalises_experts, "router normalisation", "layers.0.router"),
    Fault("router in bfloat16", EXPERTS, lambda m: in_bfloat16(layer(m, 0).mlp.gate), "router dtype", "layers.0.router", says="bfloat16"),
    Fault("experts have each other's weights", EXPERTS, reversed_weights, "router order", "layers.0.router"),
    Fault("an expert fewer", EXPERTS, one_expert_fewer, "router top-k", "layers.0.router"),
    Fault("weights of experts times a factor", EXPERTS, router_times, "wrong scale", "layers.0.router", says="2.5"),
    Fault("bias of experts dropped", BIASED,
        lambda m: layer(m, 1).mlp.gate.e_score_correction_bias.zero_(), "missing weights", "layers.1.router", says="e_score_correction_bias"),
    Fault("no window", WINDOWS, lambda m: with_mask(m, None), "attention window", "layers.0.attention", says="no window"),
    Fault("another window", WINDOWS, lambda m: with_mask(m, 3), "attention window", "layers.0.attention", says="a window of 3"),
    Fault("a window in a model without", DENSE, lambda m: with_mask(m, 20), "attention window", "layers.0.attention", says="a window of 20"),
    Fault("a head of keys is 0", DENSE,
        lambda m: weight(m, ATTENTION.format(1, "k_proj"))[:8].zero_(), "different weights", "layers.1.attention", says="8 of 32 rows, 0 first"),
    Fault("no query norm", DENSE, without_query_norm, "part left out", "layers.1.attention", says="q_norm is left out"),
    Fault("bias of queries dropped", "Qwen2ForCausalLM",
        lambda m: layer(m, 0).self_attn.q_proj.bias.data.zero_(), "missing weights", "layers.0.attention", says="q_proj.bias"),
    Fault("scale of the embedding missing", "Gemma3ForCausalLM",
        lambda m: hook(m.model.embed_tokens, lambda rows: rows / 32**0.5), "wrong scale", "embedding", says="0.176777 times"),
    Fault("hidden states times a factor", DENSE, lambda m: hook(layer(m, 1), lambda rows: 0.99 * rows), "wrong scale", "layers.1", says="0.99 times"),
    Fault("half of rope", DENSE, part_of_rope, "rope share", "layers.0.attention", says="50%"),
    Fault("experts are scored with a sigmoid", EXPERTS, sigmoid_router, "router score function", "layers.0.router"),
    Fault("shared expert left out", BIASED,
        lambda m: hook(layer(m, 1).mlp.shared_experts, torch.zeros_like), "part left out", "layers.1.mlp", says="shared_experts"),
    Fault("an expert halved", EXPERTS,
        lambda m: weight(m, "model.layers.0.mlp.experts.2.down_proj.weight").mul_(0.5), "wrong scale", "layers.0.mlp", expert=2),
    Fault("weight of a norm minus one", DENSE,
        lambda m: layer(m, 0).post_attention_layernorm.weight.data.sub_(1.0), "wrong scale", "layers.0.mlp_norm", says="plus -1"),
    Fault("bias of experts in bfloat16", BIASED,
        lambda m: rounded(layer(m, 1).mlp.gate.e_score_correction_bias, torch.bfloat16), "dtype", "layers.1", says="bfloat16"),
    Fault("another activation", "LlamaForCausalLM",
        lambda m: setattr(layer(m, 1).mlp, "act_fn", torch.nn.ReLU()), "activation function", "layers.1.mlp", says="relu"),
    Fault("values of the token before", DENSE,
        lambda m: hook(layer(m, 1).self_attn.v_proj, lambda rows: rows.roll(1, dims=1)), "unknown", "layers.1.attention"),
    Fault("every epsilon", DENSE, every_epsilon, "norm epsilon", "layers.0.norm", says="all norms is 0.001"),
    Fault("no sink", SINKS, no_sinks, "missing weights", "layers.1.attention", says="sinks"),
    Fault("sinks of 0", SINKS, sinks_zero, "missing weights", "layers.0.attention", says="sinks"),
)  # fmt: skip


def local_chunk(backend: Any) -> Any:
    (chunk,) = backend.policy.chunks
    return chunk


def trainer_layer(backend: Any, index: int) -> Any:
    return local_chunk(backend).decoder.layers[index]


def trainer_epsilon(backend: Any) -> None:
    norm = trainer_layer(backend, 1).input_layernorm
    norm.eps = norm.eps * 50


def trainer_rope(backend: Any) -> None:
    rope = local_chunk(backend).rotary_pos_emb
    steps = torch.arange(rope.inv_freq.numel())
    rope.inv_freq = 300000.0 ** (-steps / rope.inv_freq.numel())
    rope.forward.cache_clear()


def trainer_heads(backend: Any) -> None:
    """The first two groups of query heads are loaded in each other's place."""
    rows = trainer_layer(backend, 0).self_attention.linear_qkv.weight.data
    half = rows.size(0) // 2
    rows.copy_(torch.cat([rows[half:], rows[:half]]))


def trainer_missing(backend: Any) -> None:
    trainer_layer(backend, 1).mlp.linear_fc2.weight.data.zero_()


def trainer_mlp_times(backend: Any) -> None:
    def more(module: Any, inputs: Any, output: Any) -> Any:
        return output[0] * 1.05, output[1]

    trainer_layer(backend, 0).mlp.register_forward_hook(more)


def trainer_attention_rounded(backend: Any) -> None:
    def low(module: Any, inputs: Any, output: Any) -> Any:
        return output[0].bfloat16().float(), output[1]

    trainer_layer(backend, 1).self_attention.register_forward_hook(low)


def trainer_final_norm(backend: Any) -> None:
    local_chunk(backend).decoder.final_layernorm.eps = 1e-3


TRAINER_FAULTS = (
    Fault("epsilon of a norm", DENSE, trainer_epsilon, "norm epsilon", "layers.1.norm", says="5e-05"),
    Fault("rope base", DENSE, trainer_rope, "rope base", "layers.0.attention", says="300000"),
    Fault("groups of heads", DENSE, trainer_heads, "heads in another order", "layers.0.attention"),
    Fault("weight never loaded", DENSE, trainer_missing, "missing weights", "layers.1.mlp", says="down_proj"),
    Fault("MLP times a factor", DENSE, trainer_mlp_times, "wrong scale", "layers.0.mlp", says="1.05"),
    Fault("attention in bfloat16", DENSE, trainer_attention_rounded, "dtype", "layers.1.attention", says="bfloat16"),
    Fault("epsilon of the final norm", DENSE, trainer_final_norm, "norm epsilon", "norm", says="0.001"),
)  # fmt: skip
