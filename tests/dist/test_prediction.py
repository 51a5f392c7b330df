"""Multi-token prediction: its logits against a loop written from DeepSeek-V3's paper, what its loss
is and whom it reaches, all layouts, and its weights in files."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.cells import RECOMPUTE
from scripts.make_tiny_model import make_tiny_model
from slime_like.weights.families import model_families
from tests.dist import convert_worker
from tests.dist.family_layouts import CP2, EP2, EXACT, PP2, TP2, FamilyLayouts
from tests.dist.float64 import WithoutFloat32

# family -> what its files say, and how many layers predict
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "DeepseekV3ForCausalLM": ({"num_nextn_predict_layers": 1}, 1),
    "Glm4MoeForCausalLM": ({"num_nextn_predict_layers": 2}, 2),
    "DeepseekV32ForCausalLM": ({"num_nextn_predict_layers": 1}, 1),
    "Qwen3NextForCausalLM": ({}, 1),
    "Qwen3_5ForConditionalGeneration": ({"mtp_num_hidden_layers": 1}, 1),
    "MiMoForCausalLM": ({"num_nextn_predict_layers": 2, "tie_word_embeddings": True}, 2),
}
# whose attention and experts others of the cases have
IN_EXTENDED = ("Glm4MoeForCausalLM", "DeepseekV32ForCausalLM", "Qwen3_5ForConditionalGeneration")
LAYERS = 4
LENGTHS = (29, 3, 1, 17)


def make_model(family: str, folder: Path, **more: Any) -> Any:
    return make_tiny_model(family, folder, num_hidden_layers=LAYERS, **CASES[family][0], **more)


def model_with_layer(model: Any, family: str, folder: Path, number: int) -> Any:
    """transformers' model whose last layer with attention is a layer of multi-token prediction."""
    names = model_families.get(family).prediction
    assert names is not None
    tensors, other = load_file(folder / "model.safetensors"), folder.with_name(f"layer-{number}")
    start = names.layer.format(layer=number + LAYERS * names.after_the_last) + "."
    last = names.layers.format(layer=LAYERS - 1) + "."
    for name in [n for n in tensors if n.startswith(last)]:
        tensors[name] = tensors[start + name.removeprefix(last)].clone()
    model.save_pretrained(other)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return type(model).from_pretrained(other, **plain).double().eval()


def norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + zero_centered)


def by_the_paper(model: Any, family: str, folder: Path, tokens: Tensor) -> list[Tensor]:
    """2412.19437, equations 21 to 23, in float64: of each depth k the logits [T - k, V] of the
    positions that have a token k further. The tensors' names are written out for each kind of file."""
    files = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    text = model.config.get_text_config()
    eps, zero_centered = text.rms_norm_eps, "Qwen3" in family
    body = getattr(model.model, "language_model", model.model)
    hidden = body(tokens[None]).last_hidden_state[0]
    embedding, head = body.embed_tokens.weight, model.get_output_embeddings().weight
    found = []
    for k in range(1, min(CASES[family][1], len(tokens) - 1) + 1):
        if zero_centered:
            names = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"]
        elif family == "MiMoForCausalLM":
            own = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            names = [f"model.mtp_layers.{k - 1}.{n}" for n in own]
        else:
            own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            names = [f"model.layers.{LAYERS + k - 1}.{n}" for n in own]
        of_embedding, of_hidden, projection, last = (files[f"{n}.weight"] for n in names)
        if family == "MiMoForCausalLM":  # hidden state first
            projection = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)
        joined = torch.stack(
            [
                projection
                @ torch.cat(
                    [
                        norm(embedding[tokens[i + k]], of_embedding, eps, zero_centered),
                        norm(hidden[i], of_hidden, eps, zero_centered),
                    ]
                )
                for i in range(len(tokens) - k)
            ]
        )[None]
        changed = model_with_layer(model, family, folder, k - 1)
        other = getattr(changed.model, "language_model", changed.model)
        positions = torch.arange(joined.shape[1])[None]
        axes = positions.expand(3, 1, -1) if family.endswith("ConditionalGeneration") else positions
        mask = torch.full((joined.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
        hidden = other.layers[LAYERS - 1](
            joined,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=other.rotary_emb(joined, axes),
        )
        hidden = hidden[0] if hidden.dim() == 3 else hidden
        hidden = norm(hidden, last, eps, zero_centered)
        found.append(hidden @ head.T)
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.extended] if name in IN_EXTENDED else [])
        for name in CASES
    ],
)
def test_logits_are_those_of_the_paper(family: str, alone: Any, tmp_path: Path) -> None:
    """Of packed sequences; and the weights come back bit by bit."""
    from slime_like.megatron.model.prediction import update_embedding
    from slime_like.megatron.ops.ahead import ahead_rows
    from slime_like.megatron.ops.attention import packed_rows

    folder = tmp_path / "model"
    reference = make_model(family, folder)
    with torch.no_grad(), WithoutFloat32():
        chunks, hf, gpt = convert_worker.build(
            str(folder), alone, torch.float64, predicting=CASES[family][1]
        )
        settings = {"hf": hf, "gpt": gpt, "layout": alone}
        convert_worker.load_hf_weights(chunks, str(folder), **settings)
        convert_worker.in_float64(chunks)
        stored = load_file(folder / "model.safetensors")
        repeated = {n for n in stored if "embed_tokens" in n or "shared_head.head" in n}
        exported = dict(convert_worker.HfExport(chunks, **settings).stream())
        trained = {n for n in stored if not n.startswith("model.visual.") and n not in repeated} | {
            n for n in repeated if "layers" not in n
        }
        assert exported.keys() == trained - ({"lm_head.weight"} - exported.keys())
        assert all(torch.equal(x, stored[n].double()) for n, x in exported.items())

        generator = torch.Generator().manual_seed(3)
        rows = [torch.randint(hf.gpt["vocab_size"], (n,), generator=generator) for n in LENGTHS]
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        batch: Any = Packed(torch.cat(rows)[None], ends)
        packed, (chunk,) = packed_rows(ends), chunks
        packed.ahead = tuple(ahead_rows(ends, k + 1, 1, 0) for k in range(CASES[family][1]))
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        hidden = chunk(batch.tokens, positions, None, packed_seq_params=packed)
        update_embedding(chunks, alone)
        rotary = chunk.rotary_embedding(hidden, packed)
        states = chunk.mtp(hidden, rotary, packed, batch, alone)
        head = convert_worker.head_weight(chunk)[: hf.gpt["vocab_size"]]
        model = type(reference)(reference.config).double().eval()
        model.load_state_dict(reference.state_dict())
        for start, row in zip(ends.tolist(), rows):
            for k, expected in enumerate(by_the_paper(model, family, folder, row), 1):
                ours = states[k - 1][0, start : start + max(0, len(row) - k)] @ head.T
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


def test_soft_targets_are_the_policys_own_distributions(alone: Any, tmp_path: Path) -> None:
    """Of two layers, by a loop over tokens in float64; what gives the targets gets no gradient."""
    from slime_like.megatron.model.policy import LogProbHead
    from slime_like.megatron.model.prediction import update_embedding
    from slime_like.megatron.packing import pack_all
    from slime_like.megatron.prediction_loss import PredictionLoss
    from slime_like.types import TrainSample

    folder, family, temperature = tmp_path / "model", "MiMoForCausalLM", 0.7
    make_model(family, folder)
    with WithoutFloat32():
        chunks, hf, gpt = convert_worker.build(
            str(folder), alone, torch.float64, predicting=CASES[family][1]
        )
        convert_worker.load_hf_weights(chunks, str(folder), hf=hf, gpt=gpt, layout=alone)
        convert_worker.in_float64(chunks)
        (chunk,), vocab = chunks, hf.gpt["vocab_size"]
        generator = torch.Generator().manual_seed(3)
        samples = [
            TrainSample(
                tokens=torch.randint(vocab, (n + 2,), generator=generator),
                response_length=n,
                loss_mask=torch.rand(n, generator=generator) > 0.2,
                loss_weights=torch.rand(n, generator=generator),
            )
            for n in LENGTHS
        ]
        layers = CASES[family][1]
        (batch,) = pack_all([samples], multiple=1, equal_lengths=False, prediction_layers=layers)
        packed = batch.packed
        assert packed is not None
        hidden = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=packed).detach()
        hidden.requires_grad_()
        update_embedding(chunks, alone)
        head = LogProbHead(vocab, temperature, alone)
        loss, metrics = PredictionLoss(head, 0.3, soft=True)(chunk, batch, hidden)
        states = chunk.mtp(hidden, chunk.rotary_embedding(hidden, packed), packed, batch, alone)
        weight = convert_worker.head_weight(chunk)[:vocab].detach()
        own = (hidden[0].detach() @ weight.T / temperature).softmax(-1)
        total, count, plain = hidden.new_zeros(()), 0, 0.0
        starts = batch.cu_seqlens.tolist()
        for k, of_layer in enumerate(states, 1):
            predicted = (of_layer[0] @ weight.T / temperature).log_softmax(-1)
            for start, end in itertools.pairwise(starts):
                for row in range(start, end - k):
                    if batch.loss_mask[row + k]:
                        entropy = -(own[row + k] * predicted[row]).sum()
                        total = total + batch.loss_weights[row + k] * entropy
                        count, plain = count + 1, plain + float(entropy.detach())
        wanted = 0.3 / len(states) * total
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        assert metrics["mtp_loss"].count == count
        assert float(metrics["mtp_loss"].value) == pytest.approx(plain, rel=1e-12)
        parameters = [p for p in chunk.mtp.parameters() if p.requires_grad]
        ours = torch.autograd.grad(loss, parameters, allow_unused=True)
        theirs = torch.autograd.grad(wanted, parameters, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert not hidden.grad, "nothing reaches the policy"


@dataclasses.dataclass
class Packed:
    tokens: Tensor
    cu_seqlens: Tensor


def layouts_of(folder: Path, more: str = "") -> FamilyLayouts:
    """Prediction layers and all. more: flags of every run."""
    flags = {family: f"--mtp-num-layers {case[1]}{more}" for family, case in CASES.items()}
    return FamilyLayouts(folder, make_model, flags.__getitem__, EXACT, timeout_s=240)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> FamilyLayouts:
    return layouts_of(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def soft_layouts(tmp_path_factory: pytest.TempPathFactory) -> FamilyLayouts:
    """With the policy's own distributions as targets."""
    return layouts_of(tmp_path_factory.mktemp("soft"), " --mtp-soft-targets")


SOFT_CELLS = [("MiMoForCausalLM", flags) for flags in (TP2, CP2, PP2)]
IN_MAKE_TEST = [("MiMoForCausalLM", CP2)]
CELLS = {
    2: [
        ("MiMoForCausalLM", PP2),
        ("MiMoForCausalLM", TP2),
        ("MiMoForCausalLM", "--tensor-model-parallel-size 2"),
        ("MiMoForCausalLM", f"--micro-batch-size 1 {RECOMPUTE['recompute']}"),  # DP2
        ("DeepseekV3ForCausalLM", f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
        ("DeepseekV3ForCausalLM", PP2),
        ("Glm4MoeForCausalLM", f"{CP2} {EP2}"),
        ("Qwen3_5ForConditionalGeneration", CP2),
        ("Qwen3_5ForConditionalGeneration", TP2),
    ],
    4: [
        ("Glm4MoeForCausalLM", f"{PP2} {EP2}"),
        ("Glm4MoeForCausalLM", f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {CP2}"),
        ("MiMoForCausalLM", f"{PP2} {TP2}"),
        ("Qwen3NextForCausalLM", f"{TP2} {CP2} {EP2} {RECOMPUTE['recompute']}"),
    ],
}


def test_a_layout_gives_the_numbers_of_one_process(layouts: FamilyLayouts, tmp_path: Path) -> None:
    layouts.check(2, IN_MAKE_TEST, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", CELLS)
def test_further_layouts(layouts: FamilyLayouts, tmp_path: Path, ranks: int) -> None:
    layouts.check(ranks, CELLS[ranks], tmp_path)


@pytest.mark.extended
def test_soft_targets_in_layouts(soft_layouts: FamilyLayouts, tmp_path: Path) -> None:
    soft_layouts.check(2, SOFT_CELLS, tmp_path)


@pytest.mark.usefixtures("float64")
def test_the_policy_learns_as_without_it(alone: Any, tmp_path: Path) -> None:
    """Bit by bit; the loss is the mean over what the policy learns from, however it is cut, and a
    saved model has all of it."""
    from benchmarks.parity.steps import gradients, share, train_samples
    from slime_like.megatron.backend import MegatronBackend
    from slime_like.types import TrainBatch
    from tests.dist.float64 import settings

    folder = tmp_path / "model"
    make_model("DeepseekV3ForCausalLM", folder)
    batch = TrainBatch(share(train_samples(1), alone).samples)
    found = {}
    for name, flags in {
        "without": "--micro-batch-size 2",
        "with": "--micro-batch-size 2 --mtp-num-layers 1",
        "cut": "--micro-batch-size 8 --mtp-num-layers 1 --enable-mtp-training",
        "twice": "--micro-batch-size 2 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.4",
        "soft": "--micro-batch-size 2 --mtp-num-layers 1 --mtp-soft-targets",
    }.items():
        config = settings(str(folder), f"--clip-grad 0 {flags}")
        built = MegatronBackend(config, alone, total_steps=1)
        if name == "with":
            built.save_hf(str(tmp_path / "saved"))
        metrics = dict(built.forward_backward(batch).metrics)
        found[name] = metrics, gradients(built)
    (plain, base), (metrics, own) = found["without"], found["with"]
    head = {n for n in own if ".layers.4." in n}
    assert own.keys() - base.keys() == head and len(head) > 10
    assert all(torch.equal(own[n], base[n]) for n in base)
    assert all(torch.equal(found["soft"][1][n], base[n]) for n in base)
    assert found["soft"][0]["mtp_loss"] != metrics["mtp_loss"]
    biases = "e_score_correction_bias"
    assert all(own[n].any() for n in head if biases not in n and ".experts." not in n)
    assert metrics["loss"] == plain["loss"] and "mtp_loss" not in plain
    for n in head:
        if biases not in n:
            torch.testing.assert_close(found["twice"][1][n], 2 * own[n], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["cut"][1][n], own[n], rtol=1e-12, atol=1e-12)
    assert found["cut"][0]["mtp_loss"] == pytest.approx(metrics["mtp_loss"], rel=1e-12)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "saved"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
