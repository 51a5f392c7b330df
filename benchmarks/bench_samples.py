"""Cost of sending the samples of a rollout to the ranks that train on them.

    python benchmarks/bench_samples.py [--ranks 2 4 8 16 32] [--simulated 8 64 1024] [--json F]

256 responses of 4,096 tokens are on rank 0, as with servers, and every rank trains on its part of
them. For each number of gloo processes: the most memory of any rank above what it had before (MiB),
seconds, and bytes that all ranks together hold afterwards, rank 0's samples included (MiB).
"before" is how ranks once shared samples: all of them, pickled, on every rank; 16 processes would
need 10 GiB for it, so it is measured with at most --before-up-to.

Then the same delivery for ranks that are simulated, 8 to a copy of the model, with 32 responses for
each copy: what rank 0 sends, the most that another rank sends and gets, the index, the messages of
rank 0, and the most bytes under way at a time on a rank. `tests/dist/test_samples.py` holds this
arithmetic to what real processes send.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402
from benchmarks.parity.ranks import run_ranks  # noqa: E402
from slime_like.distributed.exchange import Delivery, Sharing  # noqa: E402
from slime_like.samples.exchange import BUFFER_SIZE, deliver_samples, share_index  # noqa: E402
from slime_like.samples.index import ROW  # noqa: E402
from slime_like.samples.payload import payload_size  # noqa: E402
from slime_like.types import Sample  # noqa: E402

PROMPT = 128
RANKS_OF_COPY = 8
RESPONSES_OF_COPY = 32
MIB = 2**20


def response(i: int, tokens: int) -> Sample:
    generator = torch.Generator().manual_seed(i)
    return Sample(
        group_id=i // 8,
        sample_id=i,
        tokens=torch.randint(0, 150_000, (PROMPT + tokens,), generator=generator),
        response_length=tokens,
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        rollout_log_probs=-torch.rand(tokens, generator=generator),
        reward=i / 7,
        weight_versions=(3,) * tokens,
        response="x" * 3 * tokens,
    )


def held(samples: list[Sample]) -> int:
    """Bytes of the samples' tensors and versions."""
    tensors = sum(
        t.numel() * t.element_size()
        for s in samples
        for t in (s.tokens, s.loss_mask, s.rollout_log_probs)
        if t is not None
    )
    return tensors + sum(8 * len(s.weight_versions) for s in samples)


def status(name: str) -> int:
    """A field of this process's memory status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def gathered(own: list[Sample]) -> list[Sample]:
    """Gather all samples on every rank."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    return [sample for share in shares for sample in share]


def delivered(own: list[Sample], count: int) -> list[Sample]:
    """Deliver the samples that this rank trains on."""
    world = dist.get_world_size()
    known = share_index(own, [0] * count)
    parts = np.arange(count) * world // count
    found = deliver_samples(known, [Sharing(np.arange(world), parts)])
    return list(found.samples.values())


def measure(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, float]:
    """Measure on one rank."""
    count = arguments["count"]
    own = [response(i, arguments["tokens"]) for i in range(count)] if rank == 0 else []
    dist.all_reduce(torch.zeros(1))
    Path("/proc/self/clear_refs").write_text("5")  # reset the memory peak
    base = status("VmRSS")
    dist.barrier()
    started = time.perf_counter()
    found = gathered(own) if arguments["before"] else delivered(own, count)
    seconds = time.perf_counter() - started
    peak = status("VmHWM") - base
    copies = [s for s in found if all(s is not mine for mine in own)]
    return {"peak": peak, "seconds": seconds, "held": held(copies) + held(own)}


def real(ranks: list[int], count: int, tokens: int, before_up_to: int) -> list[dict[str, Any]]:
    rows = []
    print(f"{'ranks':>5} {'':7} {'peak MiB':>9} {'seconds':>8} {'held MiB':>9}")
    for world in ranks:
        for before in (True, False) if world <= before_up_to else (False,):
            with tempfile.TemporaryDirectory() as folder:
                found = run_ranks(
                    "benchmarks.bench_samples:measure",
                    world,
                    Path(folder),
                    {"count": count, "tokens": tokens, "before": before},
                    timeout_s=600,
                )
            row = {
                "ranks": world,
                "before": before,
                "peak_mib": max(f["peak"] for f in found) / MIB,
                "seconds": max(f["seconds"] for f in found),
                "held_mib": sum(f["held"] for f in found) / MIB,
            }
            rows.append(row)
            print(
                f"{world:5} {'before' if before else 'after':7} {row['peak_mib']:9.0f} "
                f"{row['seconds']:8.2f} {row['held_mib']:9.0f}",
                flush=True,
            )
    return rows


def simulated(ranks: list[int], tokens: int) -> list[dict[str, Any]]:
    rows = []
    size = payload_size(response(0, tokens))
    names = ("ranks", "responses", "sent_by_0", "sent", "got", "index", "messages_of_0", "buffer")
    print("\nMiB: " + "  ".join(names))
    for world in ranks:
        copies = max(1, world // RANKS_OF_COPY)
        count = copies * RESPONSES_OF_COPY
        sharing = Sharing(np.arange(world) % copies, np.arange(count) % copies)
        delivery = Delivery(
            np.zeros(count, dtype=np.int64),
            np.full(count, size, dtype=np.int64),
            [sharing],
            buffer_size=BUFFER_SIZE,
        )
        sent = np.zeros(world)
        got = np.zeros(world)
        messages = np.zeros(world)
        for rank in range(world):
            for message in (m for hop in delivery.hops(rank) for m in hop):
                (sent if message.source == rank else got)[rank] += message.nbytes
                messages[rank] += 1
        row = {
            "ranks": world,
            "responses": count,
            "sent_by_0": sent[0] / MIB,
            "sent": sent[1:].max() / MIB,
            "got": got.max() / MIB,
            "index": count * ROW.itemsize / MIB,
            "messages_of_0": int(messages[0]),
            "buffer": delivery.buffer_size / MIB,
        }
        rows.append(row)
        print("  ".join(f"{name} {row[name]:.4g}" for name in names), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="gloo processes")
    parser.add_argument("--before-up-to", type=int, default=8, help="processes")
    parser.add_argument("--simulated", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="of each response")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args()
    results = {
        "real": real(given.ranks, given.responses, given.tokens, given.before_up_to),
        "simulated": simulated(given.simulated, given.tokens),
    }
    write_json(given.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
