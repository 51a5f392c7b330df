"""Workers of tests/dist/test_self_distillation.py, on one and two processes: an optimizer step of a
policy that is its own teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import megatron_patches

megatron_patches.apply()

from benchmarks.parity.steps import VOCAB, parallel, random_samples, share  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.types import TrainBatch, TrainSample  # noqa: E402
from tests.dist.float64 import WithoutFloat32, settings  # noqa: E402

TOP, ALPHA, COEF, RATE = 7, 0.3, 0.5, 0.25
FLAGS = (
    f"--use-opd --opd-type self --opd-success-reward 1 --opd-topk {TOP} --opd-alpha {ALPHA} --opd-only "
    f"--opd-kl-coef {COEF} --opd-ema-rate {RATE} --optimizer sgd --sgd-momentum 0 --lr 0.1 --weight-decay 0 --clip-grad 0 "
    "--policy-loss-type importance_sampling --micro-batch-size 2 "
)
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "DP2": ("", {}),
    "TP2": ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2}),
    "PP2": ("--pipeline-model-parallel-size 2", {"pp": 2}),
    "CP2": ("--context-parallel-size 2", {"cp": 2}),
}


def samples_of(seed: int) -> list[TrainSample]:
    """Rewards train nothing, as with --opd-only."""
    made = random_samples(seed)
    return [replace(s, advantages=torch.zeros(s.response_length)) for s in made]


def teacher_prompts(samples: list[TrainSample]) -> list[Tensor]:
    """Longer than the policy's own, and of other tokens; the last sample has none."""
    g = torch.Generator().manual_seed(9)
    sizes = [int(torch.randint(3, 20, (), generator=g)) for _ in samples]
    return [torch.randint(VOCAB, (size,), generator=g) for size in sizes[:-1]]


def with_prompt(sample: TrainSample, prompt: Tensor) -> TrainSample:
    tokens = torch.cat([prompt, sample.tokens[-sample.response_length :]])
    return replace(sample, tokens=tokens)


def one_step(folder: str, layout: ParallelLayout, flags: str) -> dict[str, Any]:
    """By sample of this rank, what its loss needs of the teacher; the loss, the gradients, and how
    far the teacher has followed."""
    backend = MegatronBackend(settings(folder, FLAGS + flags), layout, total_steps=4)
    samples = samples_of(1)
    prompts = teacher_prompts(samples)
    own = slice(layout.dp_rank * len(samples) // layout.dp_size, None)
    local = list(share(samples, layout).samples)
    local_prompts = prompts[own][: len(local)]
    old = backend.forward(local, top_k=TOP)
    top = [o.top_tokens.long() for o in old if o.top_tokens is not None]
    asked = [replace(s, label_sets=t) for s, t in zip(local, top, strict=True)]
    taught = [with_prompt(s, p) for s, p in zip(asked, local_prompts)]
    found = backend.forward([*taught, *asked[len(taught) :]], backend.teacher)
    probs = [f.label_log_probs.exp() for f in found if f.label_log_probs is not None]
    probs[len(taught) :] = [torch.zeros_like(p) for p in probs[len(taught) :]]
    ready = [replace(s, label_weights=p) for s, p in zip(asked, probs, strict=True)]
    assert backend.teacher is not None
    before = [p.detach().clone() for c in backend.policy.chunks for p in c.parameters()]
    weights = {n: t.clone() for n, t in backend.export_weights()}
    result = backend.update(TrainBatch(tuple(ready)))
    after = [p.detach().clone() for c in backend.policy.chunks for p in c.parameters()]
    followed = [p.detach().clone() for c in backend.teacher.chunks for p in c.parameters()]
    return {
        "top": [t.tolist() for t in top],
        "probs": [p.tolist() for p in probs],
        "log_probs": [f.log_probs.tolist() for f in found[: len(taught)]],
        "metrics": dict(result.metrics),
        "change": {n: ((weights[n] - t) / 0.1).tolist() for n, t in backend.export_weights()},
        "behind": max(
            float((f - (b + RATE * (a - b))).abs().max())
            for b, a, f in zip(before, after, followed, strict=True)
        ),
        "moved": max(float((a - b).abs().max()) for b, a in zip(before, after, strict=True)),
    }


def all_layouts(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (flags, sizes) in LAYOUTS.items():
        with WithoutFloat32(), parallel(**sizes) as layout:
            found[name] = one_step(arguments["model"], layout, flags)
    return found
