"""Adapters: one process against plain autograd in float64 and against PEFT, other layouts against
one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.models import make_moe_model
from benchmarks.parity.ranks import run_ranks
from benchmarks.parity.steps import largest, random_samples, relative, share
from benchmarks.parity_table import make_model, make_rollouts
from scripts.make_tiny_model import make_tiny_model
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.lora import load_adapter
from tests.dist import lora_worker as worker
from tests.dist.float64 import EXACT
from tests.dist.test_convert_moe import make_models

pytestmark = pytest.mark.usefixtures("float64")

CLIP = 0.2
ADAM = dict(lr=3e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
PLAIN = "--lora-rank 3 --lora-alpha 6 --lr 3e-3 --adam-eps 1e-6 --weight-decay 0.1 --clip-grad 0 --adam-beta2 0.999 "
STEPS = 3
TWO_RANKS = {
    "TP2": "--tensor-model-parallel-size 2",
    "TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "PP2 VP2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "CP2": "--context-parallel-size 2",
    "DP2": "",
    "DP2 distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "TP2 SP recompute": "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
# the small model's output layer is its embedding, which has no adapter
WITH_HEAD = "--lora-target-modules all-linear unembed "
EVERYTHING = f"{WITH_HEAD}--clip-grad 0.5"
EXPERT_LAYOUTS = {
    "EP2": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    "ETP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "experts PP2": "--pipeline-model-parallel-size 2",
}
# on four ranks
EXPERTS_CUT_IN_BOTH_WAYS = {
    "EP2 x ETP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
    "EP4 ETP1": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
}
LATENT_LAYOUTS = {
    "latent TP2 SP EP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "latent CP2": "--context-parallel-size 2",
    "latent PP2": "--pipeline-model-parallel-size 2",
}
FAST = ("TP2 SP recompute", "PP2 VP2", "DP2 distributed optimizer")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "model", seed=3)
    make_rollouts(str(folder / "model" / "rollout_{rollout_id}"))
    make_moe_model(folder / "experts")
    make_rollouts(str(folder / "experts" / "rollout_{rollout_id}"))
    (folder / "out").mkdir()
    return {
        "model": str(folder / "model"),
        "experts": str(folder / "experts"),
        "out": str(folder / "out"),
    }


def policy_loss(model: Any, samples: list[Any]) -> Tensor:
    """The PPO loss written out over each sequence alone."""
    total = torch.zeros((), dtype=torch.float64)
    for s in samples:
        logits = model(s.tokens[None]).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(1, s.tokens[1:, None])[-s.response_length :, 0]
        ratio = (log_probs - s.old_log_probs).exp()
        loss = torch.maximum(-s.advantages * ratio, -s.advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        total = total + (s.loss_mask * s.loss_weights * loss).sum()
    return total


def with_adapters(
    folder: str, factors: dict[str, Tensor], scale: float
) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model in float64 whose linear layers add scale * B A x, and these factors as
    leaves."""
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )
        .double()
        .eval()
        .requires_grad_(False)
    )
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in factors.items()}
    for name, module in model.named_modules():
        if f"{name}.lora_A" in leaves:
            a, b = leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"]
            module.register_forward_hook(
                lambda _, x, y, a=a, b=b: y + scale * (x[0] @ a.t() @ b.t())
            )  # type: ignore[misc]
    return model, leaves


def take_the_same_steps(
    backend: MegatronBackend, alone: Any, model: Any, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Three steps of AdamW here and on the leaves of a transformers model; losses, gradients, norms
    and factors agree. Returns the factors."""
    optimizer = torch.optim.AdamW(leaves.values(), **ADAM)  # type: ignore[arg-type]
    for step in range(1, STEPS + 1):
        samples = random_samples(step)
        pending = backend.forward_backward(share(samples, alone))
        optimizer.zero_grad()
        loss = policy_loss(model, samples)
        loss.backward()
        assert pending.metrics["loss"] == pytest.approx(loss.item(), rel=EXACT)
        found = worker.gradients(backend)
        assert found.keys() == leaves.keys()
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        for name in leaves:
            assert relative(found[name], grads[name]) < EXACT, (step, name)
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        assert backend.optim_step(pending).grad_norm == pytest.approx(norm, rel=EXACT)
        optimizer.step()
    after = worker.factors(backend)
    for name, leaf in leaves.items():
        assert relative(after[name].to(leaf), leaf.detach()) < EXACT, name
    return after


def test_one_process_takes_the_steps_of_plain_autograd(alone: Any, files: dict[str, str]) -> None:
    """Losses, gradients of every factor and the factors after three steps of AdamW; nothing of the
    base has moved, or has a gradient."""
    backend = MegatronBackend(
        worker.settings(files["model"], PLAIN + WITH_HEAD), alone, total_steps=STEPS
    )
    start = worker.factors(backend)
    assert all(bool((t == 0).all()) == name.endswith("lora_B") for name, t in start.items())
    model, leaves = with_adapters(files["model"], start, scale=2.0)
    assert len(leaves) == 4 * 7 * 2 + 2
    base = {
        name: p.clone() for chunk in backend.policy.chunks for name, p in chunk.named_parameters()
    }
    after = take_the_same_steps(backend, alone, model, leaves)
    moved = {name: float((after[name] - start[name]).norm()) for name in start}
    assert min(moved.values()) > 1e-3
    for chunk in backend.policy.chunks:
        for name, p in chunk.named_parameters():
            assert (
                torch.equal(p, base[name])
                and p.grad is None
                and not p.requires_grad
                and not hasattr(p, "main_grad")
            ), name


def test_an_adapter_starts_as_its_base(alone: Any, files: dict[str, str]) -> None:
    """The new adapter's log-probs are the base's, bit by bit; and the base is the reference model
    also after a step."""
    backend = worker.make_backend(files["model"], alone, "")
    samples = random_samples(1)
    reference = backend.forward(samples, backend.reference)
    for local, its in zip(backend.forward(samples), reference, strict=True):
        assert torch.equal(local.log_probs, its.log_probs)
    worker.start_from_noise(backend)
    for local, now, its in zip(
        backend.forward(samples),
        backend.forward(samples, backend.reference),
        reference,
        strict=True,
    ):
        assert torch.equal(now.log_probs, its.log_probs)
        assert bool((local.log_probs != its.log_probs).eq(now.log_probs != 0).all()), (
            "another model at every active token"
        )


def compare(found: dict[str, Any], one: dict[str, Any], label: str) -> None:
    assert (
        found["factors"].keys() == one["factors"].keys()
        and found["gradients"].keys() == one["gradients"].keys()
    )
    for name, tensor in one["first"].items():
        assert torch.equal(found["first"][name], tensor), (
            f"{label}: a new adapter's {name} depends on the layout"
        )
    rank, ranks = found["dp"]
    size = len(one["log_probs"]) // ranks
    for key in ("log_probs", "reference"):
        local = one[key][rank * size : (rank + 1) * size]
        assert (
            largest(float((a - b).abs().max()) for a, b in zip(found[key], local, strict=True))
            < EXACT
        ), (label, key)
    scale = max(map(abs, one["losses"]))
    assert (
        largest(abs(a - b) / scale for a, b in zip(found["losses"], one["losses"], strict=True))
        < EXACT
    ), label
    assert found["norms"] == pytest.approx(one["norms"], rel=EXACT), label
    for key in ("gradients", "factors", "merged"):
        for name, tensor in one[key].items():
            assert relative(found[key][name], tensor) < EXACT, (label, key, name)


def compare_layouts(
    layouts: dict[str, str],
    one: dict[str, Any],
    files: dict[str, str],
    folder: Path,
    ranks: int = 2,
) -> None:
    """layouts: their flags, by name."""
    run_ranks(
        "tests.dist.lora_worker:layouts",
        ranks,
        folder,
        {**files, "layouts": layouts},
        timeout_s=240,
    )
    for name in layouts:
        for rank in range(ranks):
            compare(torch.load(f"{files['out']}/{name}-{rank}.pt"), one, f"{name} rank {rank}")


@pytest.mark.parametrize(
    "names",
    [FAST, pytest.param(tuple(n for n in TWO_RANKS if n not in FAST), marks=pytest.mark.slow)],
    ids=len,
)
def test_layouts_train_the_adapter_of_one_process(
    names: tuple[str, ...], alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    one = worker.train(files["model"], alone, WITH_HEAD)
    assert min(one["norms"]) > 1.0, "clipped"
    compare_layouts({name: WITH_HEAD + TWO_RANKS[name] for name in names}, one, files, tmp_path)


@pytest.mark.slow
def test_experts_and_the_output_layer(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """Every linear layer of a mixture of experts, and an output layer with its own weight."""
    files = {**files, "model": files["experts"]}
    one = worker.train(files["model"], alone, EVERYTHING)
    assert (
        "lm_head.lora_A" in one["factors"]
        and "model.layers.3.mlp.experts.2.down_proj.lora_B" in one["factors"]
    )
    assert min(float(g.norm()) for name, g in one["gradients"].items() if "lm_head" in name) > 0
    compare_layouts(
        {name: f"{EVERYTHING} {flags}" for name, flags in EXPERT_LAYOUTS.items()},
        one,
        files,
        tmp_path,
    )


@pytest.mark.slow
def test_experts_cut_in_both_ways(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """The ranks of an expert's parts, and those with other experts."""
    files = {**files, "model": files["experts"]}
    one = worker.train(files["model"], alone, EVERYTHING)
    layouts = {name: f"{EVERYTHING} {flags}" for name, flags in EXPERTS_CUT_IN_BOTH_WAYS.items()}
    compare_layouts(layouts, one, files, tmp_path, ranks=4)


@pytest.fixture(scope="module")
def latent(files: dict[str, str]) -> dict[str, str]:
    """With DeepSeek-V3's attention, and compressed queries."""
    folder = Path(files["model"]).parent / "latent"
    model = make_models(folder, ["deepseek-v3"], vocab_size=61)["deepseek-v3"]
    make_rollouts(f"{model}/rollout_{{rollout_id}}")
    return {**files, "model": model}


@pytest.mark.slow
def test_latent_attention(alone: Any, latent: dict[str, str], tmp_path: Path) -> None:
    """Every linear layer of the attention."""
    one = worker.train(latent["model"], alone, EVERYTHING)
    targeted = {name.split(".")[-2] for name in one["factors"] if ".self_attn." in name}
    assert targeted == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert min(float(g.norm()) for name, g in one["gradients"].items() if ".self_attn." in name) > 0
    compare_layouts(
        {name: f"{EVERYTHING} {flags}" for name, flags in LATENT_LAYOUTS.items()},
        one,
        latent,
        tmp_path,
    )


@pytest.fixture(scope="module")
def kimi(files: dict[str, str]) -> dict[str, str]:
    """With Kimi delta attention, two layers of it, and one of latent attention."""
    folder = Path(files["model"]).parent / "kimi"
    make_tiny_model("KimiLinearForCausalLM", folder)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    return {**files, "model": str(folder)}


def test_kimi_takes_the_steps_of_plain_autograd(alone: Any, kimi: dict[str, str]) -> None:
    """The projections of query, key and value of a delta net are one layer here."""
    flags = f"{PLAIN} --lora-target-modules attn"
    backend = MegatronBackend(worker.settings(kimi["model"], flags), alone, total_steps=STEPS)
    start = worker.factors(backend)
    model, leaves = with_adapters(kimi["model"], start, scale=2.0)
    assert len(leaves) == 2 * 3 * 4
    take_the_same_steps(backend, alone, model, leaves)


def test_heads_of_layers_that_differ(alone: Any, files: dict[str, str]) -> None:
    """Gemma 4's layers without a window have larger heads and no projection of values."""
    folder = Path(files["model"]).parent / "gemma4"
    # a hidden size with an exact root, of which transformers has the float32 number
    make_tiny_model("Gemma4ForCausalLM", folder, hidden_size=64)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    flags = f"{PLAIN} --lora-target-modules q_proj k_proj v_proj o_proj"
    backend = MegatronBackend(worker.settings(str(folder), flags), alone, total_steps=STEPS)
    start = worker.factors(backend)
    model, leaves = with_adapters(str(folder), start, scale=2.0)
    assert len(leaves) == 2 * (4 + 3 + 3)
    take_the_same_steps(backend, alone, model, leaves)


@pytest.mark.slow
def test_kimi_in_layouts(alone: Any, kimi: dict[str, str], tmp_path: Path) -> None:
    one = worker.train(kimi["model"], alone, EVERYTHING)
    assert min(float(g.norm()) for name, g in one["gradients"].items() if ".self_attn." in name) > 0
    layouts = {f"Kimi {name}": f"{EVERYTHING} {f}" for name, f in LATENT_LAYOUTS.items()}
    del layouts["Kimi latent PP2"]  # of three layers
    compare_layouts(layouts, one, kimi, tmp_path)


@pytest.mark.slow
def test_glm5_in_layouts(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """Delta nets and latent attention that read and write residual streams."""
    folder = Path(files["model"]).parent / "glm5"
    make_tiny_model("Glm5NextForConditionalGeneration", folder, num_hidden_layers=4)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    glm5 = {**files, "model": str(folder)}
    one = worker.train(glm5["model"], alone, EVERYTHING)
    assert {name.split(".")[3] for name in one["factors"] if "layers" in name} == set("0123")
    assert not any(".hc_" in name or ".indexer." in name for name in one["factors"])
    layouts = {f"GLM-5.3 {name}": f"{EVERYTHING} {f}" for name, f in LATENT_LAYOUTS.items()}
    compare_layouts(layouts, one, glm5, tmp_path)


@pytest.mark.slow
def test_a_memory_of_ngrams_in_layouts(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """It is frozen, with the gates of residual streams; adapters behind it learn through it."""
    folder = Path(files["model"]).parent / "qwen4"
    make_tiny_model("Qwen4ExpForConditionalGeneration", folder, num_hidden_layers=4)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    qwen4 = {**files, "model": str(folder)}
    one = worker.train(qwen4["model"], alone, EVERYTHING)
    layers = {name.split(".layers.")[1][0] for name in one["factors"] if ".layers." in name}
    assert layers == set("0123")
    frozen = (".ple.", "hyper_connection", ".indexer.")
    assert not any(part in name for name in one["factors"] for part in frozen)
    # adapters of layer 0 reach the loss through the memory of layer 2 too
    assert min(float(g.norm()) for n, g in one["gradients"].items() if ".layers.0." in n) > 0
    layouts = {f"Qwen3.8 {name}": f"{EVERYTHING} {f}" for name, f in LATENT_LAYOUTS.items()}
    compare_layouts(layouts, one, qwen4, tmp_path)


@pytest.mark.slow
def test_experts_of_deepseek_v4_in_layouts(
    alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """Also those that are selected by token. Its attention has no adapters; what is behind it
    learns through it, and through the residual streams."""
    folder = Path(files["model"]).parent / "deepseek-v4"
    make_tiny_model("DeepseekV4ForCausalLM", folder, num_hidden_layers=4)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    deepseek = {**files, "model": str(folder)}
    flags = EVERYTHING.replace("all-linear unembed", "mlp")
    assert flags != EVERYTHING
    one = worker.train(deepseek["model"], alone, flags)
    assert {name.split(".")[1] for name in one["factors"] if "layers" in name} == set("0123")
    assert all(".ffn." in name for name in one["factors"])
    layouts = {f"DeepSeek-V4 {name}": f"{flags} {f}" for name, f in LATENT_LAYOUTS.items()}
    compare_layouts(layouts, one, deepseek, tmp_path)


@pytest.mark.slow
def test_shared_keys_of_gemma4_in_layouts(
    alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """Adapters of the layers whose keys are shared learn through those that share them."""
    folder = Path(files["model"]).parent / "gemma4-e2b"
    changes: dict[str, Any] = {
        **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 101},
        **{"attention_k_eq_v": False, "hidden_size": 64},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    make_tiny_model("Gemma4ForCausalLM", folder, **changes)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    gemma = {**files, "model": str(folder)}
    one = worker.train(gemma["model"], alone, EVERYTHING)
    keys = {name.split(".")[2] for name in one["factors"] if "k_proj" in name}
    assert keys == set("0123")
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    layouts = {
        "E2B TP2": f"--tensor-model-parallel-size 2 --sequence-parallel {recompute}",
        "E2B PP2": f"--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 4 {recompute}",
    }
    compare_layouts({n: f"{EVERYTHING} {f}" for n, f in layouts.items()}, one, gemma, tmp_path)


@pytest.mark.slow
def test_blocks_of_nemotron_in_layouts(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """Attention, an MLP without a gate, and experts on a latent; Mamba-2 has no adapter."""
    folder = Path(files["model"]).parent / "nemotron"
    make_tiny_model("NemotronHForCausalLM", folder, num_hidden_layers=4, moe_latent_size=20)
    make_rollouts(f"{folder}/rollout_{{rollout_id}}")
    nemotron = {**files, "model": str(folder)}
    one = worker.train(nemotron["model"], alone, EVERYTHING)
    assert {name.split(".")[2] for name in one["factors"] if "layers" in name} == {"1", "2", "3"}
    layouts = {f"Nemotron {name}": f"{EVERYTHING} {f}" for name, f in LATENT_LAYOUTS.items()}
    compare_layouts(layouts, one, nemotron, tmp_path)


def test_one_process_takes_the_steps_of_peft(
    alone: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """The PEFT library on the same model: an adapter that it made is loaded here, both train, the
    adapter that is saved here is loaded there. Losses, gradients, factors, logits; and the merged
    weights are PEFT's merged weights."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(
        files["model"], attn_implementation="eager"
    ).double()
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj", "gate_proj", "down_proj", "lm_head"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "start")
    flags = f"{PLAIN} --lora-target-modules q_proj v_proj gate_proj down_proj lm_head --lora-adapter-path {tmp_path / 'start'}"
    backend = MegatronBackend(worker.settings(files["model"], flags), alone, total_steps=STEPS)
    leaves = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert len(leaves) == 4 * 4 * 2 + 2
    take_the_same_steps(backend, alone, model, leaves)

    file = tmp_path / "start" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: t + 1 if "base_layer" in name else t for name, t in tensors.items()}, file)
    with pytest.raises(ValueError, match=r"lm_head.base_layer is not the output layer of"):
        load_adapter(str(file.parent), worker.adapter_of(backend), files["model"])

    backend.save_adapter(str(tmp_path / "end"))
    fresh = AutoModelForCausalLM.from_pretrained(
        files["model"], attn_implementation="eager"
    ).double()
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "end").eval()
    samples = random_samples(5)
    with torch.no_grad():
        for sample, ours in zip(samples, backend.forward(samples), strict=True):
            log_p = (
                loaded(sample.tokens[None])
                .logits[0, :-1]
                .log_softmax(-1)[-sample.response_length :]
            )
            its = log_p.gather(1, sample.tokens[-sample.response_length :, None])[:, 0]
            torch.testing.assert_close(
                ours.log_probs, torch.where(sample.loss_mask, its, 0.0), rtol=EXACT, atol=EXACT
            )
    head = loaded.get_base_model().lm_head.get_delta_weight("default")
    merged = {
        name: tensor.clone() for name, tensor in loaded.merge_and_unload().state_dict().items()
    }
    # PEFT adds the output layer's product to the embedding too, for they are one tensor there; its
    # model before the merge does not
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    merged["model.embed_tokens.weight"] -= head
    for name, tensor in worker.weights(backend).items():
        torch.testing.assert_close(tensor, merged[name], rtol=EXACT, atol=EXACT)

    folder = backend.save_hf(str(tmp_path / "merged"))
    untied = AutoModelForCausalLM.from_pretrained(folder)
    assert not untied.config.tie_word_embeddings
    state = untied.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in worker.weights(backend).items())
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_an_output_layer_of_either_name(alone: Any, files: dict[str, str], tmp_path: Path) -> None:
    """A tied output layer is saved under the name that the family's files have, and also loaded as
    lm_head, as PEFT and earlier versions call it."""
    folder, name = tmp_path / "model", "base_model.model.language_model.lm_head.lora_B.weight"
    make_tiny_model("Gemma3ForConditionalGeneration", folder)
    settings = worker.settings(str(folder), f"{PLAIN} {WITH_HEAD}")
    backend = MegatronBackend(settings, alone, total_steps=STEPS)
    backend.save_adapter(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[name] += 1
    save_file(tensors, file)
    load_adapter(str(file.parent), worker.adapter_of(backend), str(folder))
    factors = worker.factors(backend)
    assert factors["language_model.lm_head.lora_B"].min() == 1
    tensors[name] += 1
    save_file({n.replace("language_model.lm_head", "lm_head"): t for n, t in tensors.items()}, file)
    load_adapter(str(file.parent), worker.adapter_of(backend), str(folder))
    factors = worker.factors(backend)
    assert factors["language_model.lm_head.lora_B"].min() == 2
