"""The vocabulary projection with log-prob and entropy, forward and backward: time and peak memory
of the lean head against versions that hold the logits.

    # 1024 tokens, 65536 words, hidden size 256, float32: the size that the targets are for
    python benchmarks/bench_head.py
    python benchmarks/bench_head.py --tokens 32768 --vocab 151936 --hidden 4096 --dtype bfloat16 \\
        --device cuda

Versions, all with gradients for hidden states and weight:
    naive          log_softmax and autograd
    materialising  logits, then vocab_parallel.py
    in place       logits, then a function written for this comparison: as few passes and buffers
                   of [tokens, vocabulary] as torch allows
    lean           ops/fused_linear_logprob.py; also with every second row masked, and for several
                   block sizes

Time is the minimum over repetitions, in which all versions take turns; ratios are against the
fastest version that holds the logits. Peak is what forward and backward allocate beyond inputs and
warm-up: by a counter of the tensors that are alive (on CUDA by the allocator), and, on CPU, by the
growth of the process's largest resident size, each version in a separate process. Exit status 1
when a target of this size is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import megatron_patches  # noqa: E402

megatron_patches.apply()

from benchmarks.bench_common import growth_exponent, write_json  # noqa: E402
from benchmarks.vocab_parallel import vocab_parallel_log_probs  # noqa: E402
from slime_like.megatron.ops import fused_linear_logprob  # noqa: E402
from slime_like.megatron.ops.fused_linear_logprob import fused_linear_log_probs  # noqa: E402

MIB = 2**20
# "processor" is CPU time of this process: for shared machines, with one thread
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
HOLDING_LOGITS = ("naive", "materialising", "in place")
# at 1024 x 65536 x 256 in float32 on CPU
PEAK_LIMIT_MIB = 300.0
TIME_LIMIT = 1.1


@dataclass(frozen=True)
class Problem:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T]
    grads: Tensor  # [2, T], by log-probs and entropy
    entropy_gradient: bool
    clock: Callable[[], float]

    @classmethod
    def make(cls, options: argparse.Namespace, tokens: int | None = None) -> Problem:
        g = torch.Generator().manual_seed(0)
        dtype = getattr(torch, options.dtype)
        count = options.tokens if tokens is None else tokens
        hidden = (
            torch.randn(count, options.hidden, generator=g)
            .to(options.device, dtype)
            .requires_grad_()
        )
        weight = torch.randn(options.vocab, options.hidden, generator=g)
        weight.div_(options.hidden**0.5)  # in place: a copy would raise the baseline of the peak
        weight = weight.to(options.device, dtype).requires_grad_()
        labels = torch.randint(options.vocab, (count,), generator=g).to(options.device)
        grads = torch.randn(2, count, generator=g).to(options.device)
        return cls(
            hidden, weight, labels, grads, not options.no_entropy_gradient, CLOCKS[options.clock]
        )


class _InPlace(torch.autograd.Function):
    """Log-probs and entropy from logits, which are overwritten with log-probs and saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        z = logits if logits.dtype == torch.float32 else logits.float()
        z.sub_(z.amax(dim=1, keepdim=True))
        p = z.exp()
        total = p.sum(dim=1)
        weighted = p.mul_(z).sum(dim=1)
        log_total = total.log()
        log_p = z.sub_(log_total.unsqueeze(1))
        entropy = log_total - weighted / total
        ctx.save_for_backward(log_p, labels, entropy)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None]:
        log_p, labels, entropy = ctx.saved_tensors
        p = log_p.exp()
        if grad_entropy is None:
            p.mul_(-grad_log_probs.unsqueeze(1))
        else:
            slope = -grad_entropy
            p.mul_(
                log_p.mul_(slope.unsqueeze(1)).add_((slope * entropy - grad_log_probs).unsqueeze(1))
            )
        p.scatter_add_(1, labels.unsqueeze(1), grad_log_probs.unsqueeze(1))
        return p.to(ctx.dtype), None


def naive(p: Problem, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    hidden, labels = (p.hidden, p.labels) if rows is None else (p.hidden[rows], p.labels[rows])
    log_p = (hidden @ p.weight.t()).float().log_softmax(dim=-1)
    return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def materialising(p: Problem, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = p.hidden @ p.weight.t()
    if rows is None:
        return vocab_parallel_log_probs(logits, p.labels, vocab_size=p.weight.size(0))
    return vocab_parallel_log_probs(
        logits.index_select(0, rows), p.labels[rows], vocab_size=p.weight.size(0)
    )


def in_place(p: Problem, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    hidden, labels = (p.hidden, p.labels) if rows is None else (p.hidden[rows], p.labels[rows])
    log_probs, entropy = _InPlace.apply(hidden @ p.weight.t(), labels)
    return log_probs, entropy


def lean(p: Problem, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return fused_linear_log_probs(
        p.hidden, p.weight, p.labels, rows=rows, vocab_size=p.weight.size(0)
    )


VERSIONS: dict[str, Callable[[Problem, Tensor | None], tuple[Tensor, Tensor]]] = {
    "naive": naive,
    "materialising": materialising,
    "in place": in_place,
    "lean": lean,
}


def run(name: str, p: Problem, rows: Tensor | None = None) -> tuple[float, float]:
    """Seconds of forward and backward. The gradients stay in `p`."""
    p.hidden.grad = p.weight.grad = None
    start = _now(p)
    log_probs, entropy = VERSIONS[name](p, rows)
    middle = _now(p)
    of_log_probs, of_entropy = p.grads if rows is None else p.grads[:, rows]
    outputs = (log_probs, entropy) if p.entropy_gradient else (log_probs,)
    torch.autograd.backward(outputs, (of_log_probs, of_entropy)[: len(outputs)])
    return middle - start, _now(p) - middle


def _now(p: Problem) -> float:
    if p.hidden.is_cuda:
        torch.cuda.synchronize()
    return p.clock()


class LiveBytes(TorchDispatchMode):
    """Counts the peak of live bytes of tensors created under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            id(a.untyped_storage())
            for a in (*args, *(kwargs or {}).values())
            if isinstance(a, Tensor)
        }
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key = id(storage)
        size = storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def peaks(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Peak of one version in MiB, in this process: live tensors, and growth of resident memory,
    which is valid for the first version that runs in the process."""
    small = argparse.Namespace(**{**vars(options), "vocab": 512})
    run(name, Problem.make(small, 64))
    p = Problem.make(options)
    rows = half_of(p) if options.half else None
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(name, p, rows)
        return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / MIB}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(name, p, rows)
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    p.hidden.grad = p.weight.grad = None
    with LiveBytes() as live:
        run(name, p, rows)
    return {"peak_mib": live.peak / MIB, "resident_mib": resident}


def half_of(p: Problem) -> Tensor:
    return torch.arange(0, p.hidden.size(0), 2, device=p.hidden.device)


def peaks_apart(name: str, options: argparse.Namespace, *, half: bool) -> dict[str, float]:
    """`peaks` in a separate process, forked before this one has threads; on CUDA in this process,
    with the counts of the allocator."""
    options = argparse.Namespace(**{**vars(options), "half": half})
    if options.device == "cuda":
        return peaks(name, options)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(peaks(name, options)))
    child.start()
    sender.close()
    try:
        result: dict[str, float] = receiver.recv()
    finally:
        child.join()
    return result


def times(
    cases: dict[str, tuple[str, Tensor | None]], p: Problem, repetitions: int
) -> dict[str, dict[str, float]]:
    """Minimum seconds of each case; cases are run in turn."""
    best: dict[str, tuple[float, float]] = {}
    for repetition in range(repetitions + 1):
        for label, (name, rows) in cases.items():
            seconds = run(name, p, rows)
            if repetition > 0 and (
                label not in best or sum(seconds) < sum(best[label])
            ):  # the first repetition is a warm-up
                best[label] = seconds
    return {
        label: {"forward_s": forward, "backward_s": backward, "seconds": forward + backward}
        for label, (forward, backward) in best.items()
    }


def table(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    names = [name for name in VERSIONS if name not in options.without]
    peak = {
        (name, half): peaks_apart(name, options, half=half)
        for name in names
        for half in (False, True)
    }
    p = Problem.make(options)
    cases: dict[str, tuple[str, Tensor | None]] = {name: (name, None) for name in names}
    cases |= {f"{name}, half of the rows": (name, half_of(p)) for name in names}
    rows = times(cases, p, options.repetitions)
    fastest = min(rows[name]["seconds"] for name in names if name in HOLDING_LOGITS)
    for label, (name, chosen) in cases.items():
        rows[label] |= {"ratio": rows[label]["seconds"] / fastest, **peak[name, chosen is not None]}
    return rows


def curve(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Seconds and peak of the lean head over the number of tokens, in total and per token without
    the gradient of the weight."""
    found = {}
    for tokens in options.curve:
        p = Problem.make(options, tokens)
        seconds = times({"lean": ("lean", None)}, p, options.repetitions)["lean"]["seconds"]
        small = argparse.Namespace(**{**vars(options), "tokens": tokens, "half": False})
        peak = peaks("lean", small)["peak_mib"]
        of_weight = p.weight.numel() * p.weight.element_size() / MIB
        found[tokens] = {
            "seconds": seconds,
            "us_per_token": 1e6 * seconds / tokens,
            "peak_mib": peak,
            "beside_weight_mib": peak - of_weight,
        }
    return found


def block_sizes(options: argparse.Namespace) -> dict[str, float]:
    """Seconds by block size, rows x elements."""
    p = Problem.make(options)
    found: dict[str, float] = {}
    name = "BLOCK_ELEMENTS_GPU" if options.device == "cuda" else "BLOCK_ELEMENTS_CPU"
    default = getattr(fused_linear_logprob, name)
    default_rows = fused_linear_logprob.DEFAULT_CHUNK_SIZE
    for _ in range(options.repetitions):
        for rows in (256, 512, 1024, 2048):
            for elements in (default // 4, default // 2, default, 2 * default, 4 * default):
                setattr(fused_linear_logprob, name, elements)
                start = _now(p)
                p.hidden.grad = p.weight.grad = None
                outputs = fused_linear_log_probs(
                    p.hidden, p.weight, p.labels, vocab_size=p.weight.size(0), chunk_size=rows
                )
                torch.autograd.backward(outputs, tuple(p.grads))
                label = f"{rows} rows, {elements} elements"
                found[label] = min(found.get(label, float("inf")), _now(p) - start)
    setattr(fused_linear_logprob, name, default)
    assert default_rows == fused_linear_logprob.DEFAULT_CHUNK_SIZE
    return found


@dataclass(frozen=True)
class Target:
    words: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def targets(rows: dict[str, dict[str, float]]) -> list[Target]:
    whole = rows["lean"]
    half = rows["lean, half of the rows"]
    return [
        Target("peak of live tensors, MiB", whole["peak_mib"], PEAK_LIMIT_MIB),
        Target("resident growth, MiB", whole["resident_mib"], PEAK_LIMIT_MIB),
        Target(
            "time against the fastest version that holds the logits", whole["ratio"], TIME_LIMIT
        ),
        Target(
            "time with half of the rows masked, against the same with all rows", half["ratio"], 1.0
        ),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--clock",
        default="wall",
        choices=tuple(CLOCKS),
        help="processor: on a shared machine, with --threads 1",
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-entropy-gradient", action="store_true")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        choices=HOLDING_LOGITS,
        help="versions to leave out, where memory is short",
    )
    parser.add_argument(
        "--curve",
        type=int,
        nargs="*",
        default=[],
        help="numbers of tokens for a curve of the lean head",
    )
    parser.add_argument(
        "--no-table", action="store_true", help="the curve or the sizes of a block alone"
    )
    parser.add_argument(
        "--block-sizes", action="store_true", help="the lean head over sizes of a block"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result: dict[str, Any] = {"settings": settings, "torch": torch.__version__}
    rows = {} if options.no_table else table(options)
    if rows:
        result["table"] = rows
        print(
            f"{'':34} {'forward s':>10} {'backward s':>10} {'ratio':>6} {'peak MiB':>9} "
            f"{'resident MiB':>12}"
        )
    for label, row in rows.items():
        resident = f"{row['resident_mib']:12.0f}" if "resident_mib" in row else ""
        print(
            f"{label:34} {row['forward_s']:10.3f} {row['backward_s']:10.3f} {row['ratio']:6.2f} "
            f"{row['peak_mib']:9.0f} {resident}"
        )
    if options.curve:
        result["curve"] = curve(options)
        for tokens, row in result["curve"].items():
            print(
                f"{tokens:6} tokens: {row['seconds']:7.3f} s, {row['us_per_token']:6.1f} us a "
                f"token, {row['beside_weight_mib']:6.1f} MiB beside the weight's gradient"
            )
        if len(options.curve) > 1:
            exponent = growth_exponent(
                options.curve, [row["seconds"] for row in result["curve"].values()]
            )
            print(f"the time grows with the number of tokens to the power of {exponent:.2f}")
    if options.block_sizes:
        result["block_sizes"] = block_sizes(options)
        for label, seconds in result["block_sizes"].items():
            print(f"{label:30} {seconds:.3f} s")
    missed = 0
    if rows and (options.tokens, options.vocab, options.hidden, options.dtype, options.device) == (
        1024,
        65536,
        256,
        "float32",
        "cpu",
    ):
        found = targets(rows)
        result["targets"] = [{**asdict(target), "met": target.met} for target in found]
        for target in found:
            print(
                f"{'met   ' if target.met else 'MISSED'} {target.words}: {target.value:.2f}, limit "
                f"{target.limit:g}"
            )
        missed = sum(not target.met for target in found)
    write_json(options.json, result)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
