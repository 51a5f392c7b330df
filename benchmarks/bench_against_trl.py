"""One GRPO step on one process, side by side: ours, TRL's GRPOTrainer, and a plain loop over
transformers' `generate` and torch.

    make trl-env
    python benchmarks/bench_against_trl.py [--trl-python .venv-trl/bin/python] [--rounds 3]

All sample the same prompts with the same tiny Qwen3 (float32), at most as many tokens, grade them
with the same function, and take one Adam step with the PPO loss on GRPO advantages. Random weights
end a response after 85 tokens in the mean: with --new-tokens 5 nearly all are 5 long, with
--new-tokens 256 a few are several times as long as the rest. Each runs in a
process of its own, the sides in turns; of each run the median step counts (the first ones warm up),
and of the runs the fastest. Times depend on the machine; their ratios are what is compared. On a
machine that is not idle, --processor-time counts what all processes of a side take of the
processors: the difference of a long and a short run, over the steps that one has more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import write_json  # noqa: E402
from benchmarks.trl_sides import reward  # noqa: E402
from slime_like.cli.tiny_model import make_model, make_tokenizer  # noqa: E402
from slime_like.metrics.logger import read_metrics  # noqa: E402

WARM_UP = 3
SIDES = ("ours", "plain", "trl")
NAMES = {"ours": "slime_like", "plain": "plain loop", "trl": "TRL"}


def score(args: Any, sample: Any, **others: Any) -> float:
    """Our reward function: see `trl_sides.reward`."""
    return reward(sample.response)


def make_case(
    folder: Path, *, prompts: int, samples: int, new_tokens: int, steps: int
) -> dict[str, Any]:
    """Make the model, and prompts of 6 tokens; at most `new_tokens` tokens are sampled."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden_size=128, num_layers=4, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(prompts)]
    rows = [json.dumps({"text": text, "label": ""}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    case = dict(
        model=str(folder / "model"),
        prompts=[tokenizer(text)["input_ids"] for text in texts],
        samples=samples,
        new_tokens=new_tokens,
        steps=steps,
        lr=1e-6,  # lengths stay those of random weights: a policy that learns writes longer answers
        parameters=sum(p.numel() for p in model.parameters()),
    )
    (folder / "case.json").write_text(json.dumps(case))
    return case


def ours(folder: Path, case: dict[str, Any], more: Sequence[str]) -> list[float]:
    """Seconds of each step, from the run's metrics."""
    out = folder / "out"
    command = [
        *(sys.executable, "train.py", "--hf-checkpoint", case["model"], "--output-dir", str(out)),
        *("--prompt-data", str(folder / "prompts.jsonl"), "--input-key", "text"),
        *("--label-key", "label", "--custom-rm-path", f"{__file__}:score"),
        *("--rollout-batch-size", str(len(case["prompts"]))),
        *("--n-samples-per-prompt", str(case["samples"])),
        *("--num-steps-per-rollout", "1", "--num-rollout", str(case["steps"])),
        *("--rollout-max-response-len", str(case["new_tokens"])),
        *("--lr", str(case["lr"]), "--policy-loss-type", "ppo"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
        *("--no-plot", "--no-tensorboard", "--no-progress", *more),
    ]
    run(command)
    rows = read_metrics(out / "metrics.jsonl")
    return [row["perf/step_s"] for row in rows if "train/loss" in row]


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def one_run(side: str, case: dict[str, Any], folder: Path, args: argparse.Namespace) -> float:
    """Run one side; returns the seconds of its median step."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if side == "ours":
            work = Path(scratch)
            (work / "prompts.jsonl").write_bytes((folder / "prompts.jsonl").read_bytes())
            seconds = ours(work, case, args.flags)
        else:
            sides = str(ROOT / "benchmarks/trl_sides.py")
            out = run([args.trl_python, sides, side, str(folder / "case.json")])
            seconds = json.loads(out.splitlines()[-1])
    return statistics.median(seconds[WARM_UP:] or seconds)


def processor_time(
    side: str, case: dict[str, Any], folder: Path, args: argparse.Namespace
) -> float:
    """Run one side twice; returns the processor seconds of a step, of all its processes."""
    spent = []
    for steps in (WARM_UP, case["steps"]):
        shorter = {**case, "steps": steps}
        (folder / "case.json").write_text(json.dumps(shorter))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        one_run(side, shorter, folder, args)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return (spent[1] - spent[0]) / (case["steps"] - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl/bin/python"))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of ours, after --")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        case = make_case(
            folder,
            prompts=args.prompts,
            samples=args.samples,
            new_tokens=args.new_tokens,
            steps=args.steps,
        )
        measure = processor_time if args.processor_time else one_run
        fastest = dict.fromkeys(args.sides, float("inf"))
        for _ in range(args.rounds):
            for side in args.sides:
                seconds = measure(side, case, folder, args)
                print(f"{NAMES[side]:<12} {seconds:7.3f} s a step", file=sys.stderr, flush=True)
                fastest[side] = min(fastest[side], seconds)
    print(
        f"{case['parameters'] / 1e6:.2f}M parameters, {args.prompts} prompts x {args.samples} "
        f"samples of 6 + {args.new_tokens} tokens, {args.threads} threads"
    )
    first = fastest[args.sides[0]]
    for side, seconds in fastest.items():
        print(f"{NAMES[side]:<12} {seconds:7.3f} s a step  {seconds / first:5.2f}x")
    write_json(args.json, {"seconds": fastest})


if __name__ == "__main__":
    main()
