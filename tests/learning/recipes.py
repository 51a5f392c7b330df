"""Settings with which a task is learned, and how much of it a run must have learned at its end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slime_like.metrics.logger import read_metrics
from tests.learning.tasks import write_task
from tests.paths import ROOT

REWARDS = ROOT / "tests/learning/rewards.py"
LAST = 10  # rollouts: the mean reward at the end is over so many
COMMON = "--lr-warmup-iters 10 --clip-grad 1.0 --no-tensorboard --no-progress --no-plot --log-interval 20"
GRPO = "--advantage-estimator grpo --rollout-batch-size 16 --n-samples-per-prompt 8"


@dataclass(frozen=True)
class Recipe:
    """One way to learn one task."""

    name: str  # in the table and in the test's id
    task: str  # a key of `tasks.TASKS`
    reward: str  # a function of rewards.py, or exact_match
    num_layers: int  # of the model
    flags: str  # of train.py, in addition to COMMON and what names the files; {folder} is the run's
    # start_at_most, end_at_least: the band: mean reward of the first rollout, and of the last LAST
    # ones
    start_at_most: float
    end_at_least: float


# Special tokens count, so that a policy has to learn its end: without an entropy bonus it keeps to the first end that paid.
COPY = "--rollout-max-response-len 5 --micro-batch-size 32 --num-steps-per-rollout 4 --lr 1e-3 --entropy-coef 0.03"
LARGEST = "--rollout-max-response-len 2 --micro-batch-size 32 --num-steps-per-rollout 4 --lr 3e-4 --entropy-coef 0.02"

# Four optimizer steps of 200 responses, as in verl's run, whose rates and KL in the reward the critic's recipe has too.
DIGITS = "--rollout-max-response-len 32 --micro-batch-size 200 --num-steps-per-rollout 4 --loss-reduction token_mean --use-rollout-logprobs"
DIGITS_GRPO = "--advantage-estimator grpo_token --rollout-batch-size 100 --n-samples-per-prompt 8 --lr 2e-4 --entropy-coef 0.02 --num-rollout 100"
DIGITS_PPO = (
    "--advantage-estimator ppo --normalize-advantages --rollout-batch-size 800 --n-samples-per-prompt 1 --lr 1e-4 --weight-decay 0.01"
    " --critic-lr 1e-3 --value-clip 0.5 --kl-coef 0.005 --ref-load {folder}/model --num-rollout 160"
)

RECIPES = (
    Recipe("copy, GRPO", "copy", "right_prefix", 2, f"{GRPO} {COPY} --num-rollout 100", 0.1, 0.2),
    Recipe("largest, GRPO", "largest", "exact_match", 2, f"{GRPO} {LARGEST} --num-rollout 150", 0.1, 0.7),
    Recipe("digits, GRPO of token rewards", "digits", "digit_completion", 4, f"{DIGITS} {DIGITS_GRPO}", 0.1, 0.2),
    Recipe("digits, PPO with a critic", "digits", "digit_completion", 4, f"{DIGITS} {DIGITS_PPO}", 0.1, 0.2),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a run did."""

    # first, last: mean reward of the first rollout and of the last LAST
    first: float
    last: float
    rollouts: int  # how many there were
    cpu_s: float  # processor seconds

    def within(self, recipe: Recipe) -> bool:
        return self.first <= recipe.start_at_most and self.last >= recipe.end_at_least


def command(recipe: Recipe, seed: int, folder: Path) -> list[str]:
    """The command line of a run whose files are in `folder`."""
    if recipe.reward == "exact_match":
        graded = ["--rm-type", recipe.reward]
    else:
        graded = ["--custom-rm-path", f"{REWARDS}:{recipe.reward}"]
    return [
        sys.executable, str(ROOT / "train.py"),
        "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "train.jsonl"),
        "--input-key", "prompt", "--label-key", "answer", "--rollout-shuffle",
        "--seed", str(seed), "--rollout-seed", str(seed), "--output-dir", str(folder / "run"),
        *graded, *COMMON.split(), *recipe.flags.format(folder=folder).split(),
    ]  # fmt: skip


def learn(recipe: Recipe, seed: int, folder: Path) -> Result:
    """Make model and data below `folder`, train, and read what came of it.

    Args:
        recipe: what to learn, and how.
        seed: of the weights, the held-out prompts, the order and the sampling.
        folder: for everything that is written.

    Raises:
        RuntimeError: the run ended with an error; the end of its output is in the message.
    """
    write_task(folder, recipe.task, seed, num_layers=recipe.num_layers)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = folder / "log"
    with log.open("w") as stream:
        status = subprocess.run(
            command(recipe, seed, folder),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
        ).returncode
    if status:
        raise RuntimeError(
            f"{recipe.name}, seed {seed}: exit status {status}\n{log.read_text()[-3000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    metrics = read_metrics(folder / "run" / "metrics.jsonl")
    rewards = [row["rollout/reward_mean"] for row in metrics if "rollout/reward_mean" in row]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Result(rewards[0], sum(rewards[-LAST:]) / LAST, len(rewards), seconds)
