"""Cost of a policy loss, with all its metrics, as a fraction of a training step of the demo's
model.

    python benchmarks/bench_losses.py                         # every loss; a minute or two
    python benchmarks/bench_losses.py --losses ppo sapo --json bench.json

A step is `MegatronBackend.update` on the demo's sizes: forward, backward, optimizer. Its loss part
is timed alone, on log-probs that are there already: the token losses, KL and entropy, every metric,
their backward pass to the log-probs, and the one reduction of metrics, over all micro-batches of
the step. The times are CPU seconds of this process on one thread, the least of several repetitions,
so that other work on the machine does not enter. Exit status 1 when a loss takes more than --limit
of a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron_patches  # noqa: E402

megatron_patches.apply()

from arguments.parse import parse_args  # noqa: E402
from benchmarks.bench_common import write_json  # noqa: E402
from slime_like.cli.tiny_model import make_model, make_tokenizer  # noqa: E402
from slime_like.losses import LossTerms, policy_losses  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.init import process_groups  # noqa: E402
from slime_like.megatron.objectives import Objective, PolicyObjective  # noqa: E402
from slime_like.megatron.packing import pack_all  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.metrics.typed import MetricAccumulator  # noqa: E402
from slime_like.types import MicroBatch, TrainBatch, TrainSample  # noqa: E402

# Sizes of the demo (scripts/demo.sh): one of the two optimizer steps per rollout.
SAMPLES = 128
MICRO_BATCH = 64
PROMPT = 30
RESPONSE = 8
FLAGS = (
    "--debug-train-only --num-rollout 2 --rollout-batch-size 16 --n-samples-per-prompt 8 "
    "--micro-batch-size {micro} --lr 1e-4 --no-tensorboard --no-progress --no-plot"
)
NEEDED: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
TERMS = LossTerms(kl_loss_coef=0.1, entropy_coef=0.01)


@dataclass(frozen=True)
class Row:
    """CPU milliseconds of an optimizer step and of its loss part, and the number of metrics."""

    loss: str
    step_ms: float
    loss_ms: float
    metrics: int

    @property
    def share(self) -> float:
        return self.loss_ms / self.step_ms


@dataclass(frozen=True)
class KnownHead:
    """Replaces `LogProbHead`: returns given log-probs and entropies [T], as leaf tensors."""

    log_probs: Tensor
    entropy: Tensor
    layout: ParallelLayout

    def log_probs_and_entropy(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        return self.log_probs.clone().requires_grad_(), self.entropy.clone().requires_grad_()


def known_head(batch: MicroBatch, layout: ParallelLayout) -> KnownHead:
    """Log-probs and entropies slightly different from the old policy's."""
    assert batch.old_log_probs is not None
    return KnownHead(batch.old_log_probs + 0.05, torch.ones_like(batch.loss_weights), layout)


@contextmanager
def demo_backend(work: Path) -> Iterator[MegatronBackend]:
    """The demo's model on Megatron, with this process only."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, hidden_size=64, num_layers=2, seed=1).save_pretrained(work / "model")
    words = [*FLAGS.format(micro=MICRO_BATCH).split(), "--hf-checkpoint", str(work / "model")]
    (work / "rollout_0.pt").touch()
    config = parse_args(
        [*words, "--load-debug-rollout-data", str(work / "rollout_{rollout_id}.pt")], 1
    )
    with process_groups(config.parallel, virtual_stages=None, seed=1) as layout:
        yield MegatronBackend(config, layout, total_steps=1000)


def demo_samples(backend: MegatronBackend) -> list[TrainSample]:
    """Samples of random tokens with the demo's lengths; log-probs of old policy, sampler and
    reference are slightly different from the policy's."""
    g = torch.Generator().manual_seed(1)
    made = []
    for i in range(SAMPLES):
        response = int(torch.randint(4, RESPONSE + 1, (), generator=g))
        ones = torch.ones(response)
        made.append(
            TrainSample(
                tokens=torch.randint(
                    5, backend.gpt.vocab_size or 0, (PROMPT + response,), generator=g
                ),
                response_length=response,
                loss_mask=torch.ones(response, dtype=torch.bool),
                loss_weights=ones / (SAMPLES * response),
                advantages=ones * float(torch.randn((), generator=g)),
                rewards=ones * (i % 2),
            )
        )
    known = backend.forward(made)

    def near(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=g)

    return [
        replace(
            s,
            old_log_probs=near(k.log_probs),
            rollout_log_probs=near(k.log_probs),
            ref_log_probs=near(k.log_probs),
        )
        for s, k in zip(made, known)
    ]


def least_ms(call: Callable[[], object], repetitions: int) -> float:
    """CPU milliseconds of the fastest call."""
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return 1000 * min(seconds)


def loss_part(
    model: Any, batches: Sequence[MicroBatch], heads: Sequence[KnownHead], objective: Objective
) -> dict[str, float]:
    """The loss part of one optimizer step, without the model; returns its metrics."""
    accumulator = MetricAccumulator()
    for batch, head in zip(batches, heads):
        output = PolicyObjective(head, objective)(model, batch, head.log_probs)  # type: ignore[arg-type]
        assert output.loss is not None
        output.loss.backward()
        accumulator.add(output.metrics)
    return accumulator.reduce()


def bench(names: Sequence[str], repetitions: int) -> list[Row]:
    """One row per loss. The full step is timed again with every loss."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, demo_backend(Path(folder)) as backend:
        samples = demo_samples(backend)
        batch = TrainBatch(tuple(samples))
        model = backend.policy.modules[0]
        groups = [samples[start : start + MICRO_BATCH] for start in range(0, SAMPLES, MICRO_BATCH)]
        batches = pack_all(groups, multiple=1, equal_lengths=False)
        heads = [known_head(b, backend.layout) for b in batches]
        for name in names:
            loss = policy_losses.get(name)
            objective = Objective(loss, loss.config_type(**NEEDED.get(name, {})), TERMS)
            backend.objective = objective
            backend.update(batch)  # warm up
            step = least_ms(lambda: backend.update(batch), repetitions)
            alone = least_ms(lambda: loss_part(model, batches, heads, objective), 5 * repetitions)  # noqa: B023
            rows.append(
                Row(loss.name, step, alone, len(loss_part(model, batches, heads, objective)))
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses", nargs="+", choices=policy_losses.names(), default=policy_losses.names()
    )
    parser.add_argument(
        "--repetitions", type=int, default=8, help="steps that are timed for each loss"
    )
    parser.add_argument("--limit", type=float, default=0.02, help="largest share of a step")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = bench(options.losses, options.repetitions)
    print(f"{'loss':20} {'step, ms':>9} {'loss, ms':>9} {'share':>7} {'metrics':>8}")
    for row in rows:
        print(
            f"{row.loss:20} {row.step_ms:9.1f} {row.loss_ms:9.2f} {row.share:7.2%} {row.metrics:8}"
        )
    write_json(options.json, [{**vars(row), "share": row.share} for row in rows])
    return 0 if all(row.share <= options.limit for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
