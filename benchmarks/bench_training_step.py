"""One GRPO update on sequences of very different lengths: packed, padded, and by a plain Hugging
Face and torch loop; and layout against layout.

    python benchmarks/bench_training_step.py [--json step.json] [--layouts DP2 PP2 ...]
    [--expert-layouts EP2 ...]

Nine of ten responses are short, one of ten is eleven times as long. All methods train the same
model on the same samples with the PPO loss, a token mean, Adam and clipping, in float32; that they
compute the same is checked by loss and gradient norm. Every method runs in a separate process (so
that peak memory is its own), in turns, and the fastest step counts. Layouts of experts train a
Qwen3-MoE. `core s` are the seconds in which a process computes, of the busiest rank where there are
several: other work on the machine disturbs them less than `s`, the seconds that pass, but they
leave out what ranks wait.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import bimodal_lengths, write_json  # noqa: E402
from slime_like.types import Sample  # noqa: E402

PROMPT = 16
GROUP_SIZE = 8
CLIP = 0.2
LR = 1e-4
TIMES_PADDED = 2.0  # target speed-up of packed over padded rows
SAME = 1e-3  # largest relative difference of loss and gradient norm between methods


@dataclass(frozen=True)
class Method:
    """One way to train the same samples."""

    ranks: int = 1  # number of processes
    # ours, with {size} and {budget}; None: the Hugging Face loop with `per_pass` sequences per pass
    flags: str | None = None
    per_pass: int = 0
    model: str = "dense"  # folder of the trained model


BY_TOKENS = "--use-dynamic-batch-size --max-tokens-per-gpu {budget}"
ONE_PROCESS = {
    "packed by tokens": Method(flags=BY_TOKENS),
    "packed by samples": Method(flags="--micro-batch-size {size}"),
    "padded": Method(flags="--micro-batch-size {size} --qkv-format bshd"),
    "Hugging Face, padded": Method(per_pass=8),
    "Hugging Face, one by one": Method(per_pass=1),
}
LAYOUTS = {
    "DP2": Method(2, BY_TOKENS),
    "DP2, not balanced": Method(2, BY_TOKENS + " --no-balance-data"),
    "TP2 SP": Method(2, BY_TOKENS + " --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": Method(2, BY_TOKENS + " --pipeline-model-parallel-size 2"),
    "PP2 VP2": Method(
        2, BY_TOKENS + " --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ),
    "CP2": Method(2, BY_TOKENS + " --context-parallel-size 2"),
}
EXPERTS = "experts, one process"
EXPERT_LAYOUTS = {
    "EP2": Method(2, BY_TOKENS + " --expert-model-parallel-size 2", model="experts"),
    "EP2 CP2": Method(
        2, BY_TOKENS + " --expert-model-parallel-size 2 --context-parallel-size 2", model="experts"
    ),
    "ETP2": Method(
        2, BY_TOKENS + " --tensor-model-parallel-size 2 --sequence-parallel", model="experts"
    ),
    "experts DP2": Method(2, BY_TOKENS, model="experts"),
}
METHODS = (
    ONE_PROCESS | LAYOUTS | {EXPERTS: Method(flags=BY_TOKENS, model="experts")} | EXPERT_LAYOUTS
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step."""

    hidden: int
    layers: int
    vocab: int
    sequences: int  # per optimizer step
    short: int
    long: int
    per_pass: int  # sequences per micro-batch of the other methods
    budget: int  # tokens per packed micro-batch
    steps: int


def make_samples(sizes: Sizes) -> tuple[list[Sample], list[torch.Tensor], list[torch.Tensor]]:
    """Samples, their old log-probs and advantages [R] each; equal in every process."""
    lengths = bimodal_lengths(sizes.sequences, short=sizes.short, long=sizes.long, seed=2)
    generator = torch.Generator().manual_seed(3)
    samples = []
    old = []
    advantages = []
    for i, length in enumerate(lengths.tolist()):
        tokens = torch.randint(sizes.vocab, (PROMPT + length,), generator=generator)
        samples.append(
            Sample(i // GROUP_SIZE, i, tokens, length, torch.ones(length, dtype=torch.bool))
        )
        old.append(-math.log(sizes.vocab) + 0.2 * torch.randn(length, generator=generator))
        advantages.append(torch.randn(1, generator=generator).expand(length))
    return samples, old, advantages


def make_model(folder: Path, sizes: Sizes, kind: str) -> None:
    """Make a tiny model. kind: "dense", or "experts": top-2 of eight experts per layer, with the
    same number of active weights."""
    import transformers

    torch.manual_seed(1)
    common: dict[str, Any] = dict(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=sizes.hidden // 4, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    if kind == "dense":
        config = transformers.Qwen3Config(intermediate_size=3 * sizes.hidden, **common)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    else:
        experts = dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=3 * sizes.hidden // 2,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
        )
        config = transformers.Qwen3MoeConfig(**common, **experts)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


# --- one process that measures one method ---------------------------------------------------------


def hugging_face_step(
    folder: Path, sizes: Sizes, per_pass: int
) -> Callable[[], tuple[float, float]]:
    """A hand-written training step: pad `per_pass` sequences, forward, log-probs, loss, backward;
    then clip and step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    samples, old, advantages = make_samples(sizes)
    active = sum(s.response_length for s in samples)
    padded = torch.nn.utils.rnn.pad_sequence

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(samples), per_pass):
            part = slice(start, start + per_pass)
            tokens = padded([s.tokens for s in samples[part]], batch_first=True)
            attended = padded([torch.ones_like(s.tokens) for s in samples[part]], batch_first=True)
            logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits[
                :, PROMPT - 1 : -1
            ]
            responses = tokens[:, PROMPT:]
            log_probs = -F.cross_entropy(logits.transpose(1, 2), responses, reduction="none")
            mask = attended[:, PROMPT:].bool()
            ratio = (log_probs - padded(old[part], batch_first=True)).exp()
            advantage = padded(advantages[part], batch_first=True)
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            loss = torch.where(mask, loss, 0.0).sum() / active
            loss.backward()
            total += float(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total, float(norm)

    return step


def our_step(
    folder: Path, sizes: Sizes, config: Any, layout: Any
) -> Callable[[], tuple[float, float]]:
    """`MegatronBackend.update`."""
    import dataclasses

    from slime_like.batching.step_plan import step_plan
    from slime_like.batching.train_samples import train_samples
    from slime_like.megatron.backend import MegatronBackend
    from slime_like.types import TrainBatch

    backend = MegatronBackend(config, layout, total_steps=100)
    samples, old, advantages = make_samples(sizes)
    plan = step_plan(
        config.algorithm, config.megatron.transformer, config.gpt.vocab_size or 0, layout
    )
    shares = plan.assign(samples)
    (mine,) = train_samples(plan, samples, reduction="token_mean", assignment=shares)
    places = shares.local_indices
    batch = TrainBatch(
        tuple(
            dataclasses.replace(s, old_log_probs=old[i], advantages=advantages[i], rewards=None)
            for i, s in zip(places, mine, strict=True)
        )
    )

    def step() -> tuple[float, float]:
        result = backend.update(batch)
        return result.metrics["loss"], result.grad_norm

    return step


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(step: Callable[[], tuple[float, float]], steps: int) -> dict[str, float]:
    """The fastest of `steps` after one warm-up step. memory_mib: peak memory of the process beyond
    model and samples."""
    before = resident_bytes()
    loss, norm = step()
    passed = []
    core = []
    for _ in range(steps):
        start = time.perf_counter()
        start_core = time.process_time()
        step()
        passed.append(time.perf_counter() - start)
        core.append(time.process_time() - start_core)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "loss": loss,
        "grad_norm": norm,
        "s": min(passed),
        "core_s": min(core),
        "memory_mib": (peak - before) / 2**20,
    }


def worker(name: str, folder: Path, sizes: Sizes) -> None:
    """Measure one method in this process or rank, and write the result next to the model."""
    torch.set_num_threads(1)
    method = METHODS[name]
    rank = int(os.environ.get("RANK", "0"))
    if method.flags is None:
        found = measure(
            hugging_face_step(folder / method.model, sizes, method.per_pass), sizes.steps
        )
    else:
        import megatron_patches
        from slime_like.trainer.launch import quiet_dependencies

        quiet_dependencies()
        megatron_patches.apply()
        from arguments.parse import parse_args
        from slime_like.megatron.init import process_groups

        flags = method.flags.format(size=sizes.per_pass, budget=sizes.budget)
        words = (
            f"--hf-checkpoint {folder}/{method.model} --debug-train-only "
            f"--load-debug-rollout-data {folder}/rollout_{{rollout_id}} --num-rollout 1 "
            f"--rollout-batch-size {sizes.sequences // GROUP_SIZE} --n-samples-per-prompt "
            f"{GROUP_SIZE} --lr {LR} --clip-grad 1.0 "
            f"--adam-beta2 0.999 --weight-decay 0.01 --eps-clip {CLIP} --loss-reduction "
            f"token_mean {flags}"
        )
        config = parse_args(words.split(), method.ranks)
        with process_groups(
            config.parallel, virtual_stages=config.virtual_stages, seed=1
        ) as layout:
            found = measure(our_step(folder, sizes, config, layout), sizes.steps)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


# --- the process that starts the others -----------------------------------------------------------


def run_method(name: str, folder: Path, sizes: Sizes) -> dict[str, float]:
    """Run a method; returns the maxima over ranks of seconds and memory."""
    ranks = METHODS[name].ranks
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [
        str(Path(__file__)),
        "--worker",
        name,
        "--folder",
        str(folder),
        "--sizes",
        json.dumps(vars(sizes)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
    return {key: max(f[key] for f in found) for key in found[0]}


def best(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: min(r[key] for r in rounds) for key in rounds[0]}


def compare(names: Sequence[str], sizes: Sizes, rounds: int) -> dict[str, dict[str, float]]:
    """Results of all methods; raises RuntimeError if two of them compute different numbers."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for kind in {METHODS[name].model for name in names}:
            make_model(folder / kind, sizes, kind)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                found[name].append(run_method(name, folder, sizes))
    results = {name: best(each) for name, each in found.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        for key in ("loss", "grad_norm"):
            if not abs(result[key] - first[key]) <= SAME * abs(first[key]):
                raise RuntimeError(
                    f"{name} computes another {key}: {result[key]} instead of {first[key]}"
                )
    return results


def show(results: dict[str, dict[str, float]], base: str, tokens: int) -> None:
    print(
        f"\n{'':26} {'core s':>8} {'s':>8} {'tokens/core s':>14} {'tokens/s':>9} "
        f"{'MiB of a rank':>14}   times {base}: core s, s, memory"
    )
    for name, r in results.items():
        r["tokens_per_core_s"], r["tokens_per_s"] = tokens / r["core_s"], tokens / r["s"]
        r["speed"], r["passed_speed"] = (
            results[base][clock] / r[clock] for clock in ("core_s", "s")
        )
        r["memory_ratio"] = r["memory_mib"] / results[base]["memory_mib"]
        print(
            f"{name:26} {r['core_s']:8.2f} {r['s']:8.2f} {r['tokens_per_core_s']:14.0f} "
            f"{r['tokens_per_s']:9.0f} {r['memory_mib']:14.0f} "
            f"{r['speed']:9.2f} {r['passed_speed']:5.2f} {r['memory_ratio']:5.2f}", flush=True,
        )  # fmt: skip


def missed(one: dict[str, dict[str, float]]) -> list[str]:
    """Missed targets for one process: packed rows twice as fast as padded ones, and no slower than
    the hand-written loop."""
    packed = max(one[name]["speed"] for name in one if name.startswith("packed"))
    loop = max(one[name]["speed"] for name in one if name.startswith("Hugging Face"))
    words = (
        []
        if packed >= TIMES_PADDED
        else [
            f"packed rows have {packed:.2f} times the speed of padded ones, target {TIMES_PADDED}"
        ]
    )
    return (
        words
        if packed >= loop
        else [
            *words,
            f"packed rows have {packed / loop:.2f} times the speed of the Hugging Face loop, "
            "target 1",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in vars(Sizes(192, 4, 4096, 64, 48, 528, 8, 1024, 3)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each method, in turns")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--expert-layouts", nargs="*", choices=list(EXPERT_LAYOUTS), default=list(EXPERT_LAYOUTS)
    )
    parser.add_argument("--no-one-process", action="store_true", help="layouts only")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder, Sizes(**json.loads(options.sizes)))
        return 0
    sizes = Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
    tokens = sum(s.total_length for s in make_samples(sizes)[0])
    print(f"{sizes}: {tokens} tokens in a step")
    found: dict[str, Any] = {"sizes": vars(sizes), "tokens": tokens}
    groups = {
        "one_process": ("padded", [] if options.no_one_process else list(ONE_PROCESS)),
        "layouts": (
            "packed by tokens",
            ["packed by tokens", *options.layouts] if options.layouts else [],
        ),
        "expert_layouts": (
            EXPERTS,
            [EXPERTS, *options.expert_layouts] if options.expert_layouts else [],
        ),
    }
    for group, (base, names) in groups.items():
        if names:
            found[group] = compare(names, sizes, options.rounds)
            show(found[group], base, tokens)
    write_json(options.json, found)
    wrong = missed(found["one_process"]) if "one_process" in found else []
    for words in wrong:
        print(f"MISSED {words}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
