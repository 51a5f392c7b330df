"""Pairs of answers on Megatron: the loss, its metrics and all gradients of a step are those of
transformers and a loop, and the same in every layout, however the step is cut."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.parity.ranks import run_ranks
from slime_like.cli.tiny_model import make_model, make_tokenizer
from tests.dist.float64 import EXACT
from tests.dist.pairs_worker import ONE, TWO

pytestmark = pytest.mark.usefixtures("float64")

BETA, NLL, CENTER = 0.4, 0.3, 0.02
WEIGHTS = {True: 1.5, False: 0.7}
PAIRS = [
    ("spell cat", "tac", "cat is what I would spell"),
    ("and a long question, which has no short answer, at all", "yes", "no"),
    ("add 1 and 1", "that would be two", "3"),
    ("b", "a rather long answer to a short question", "x y"),
]
COMMON = (
    "--hf-checkpoint {model} --prompt-data {data} --input-key prompt --num-rollout 1 "
    f"--rollout-batch-size {len(PAIRS)} --lr 1e-3 --no-tensorboard --no-progress --no-plot "
)
KINDS = {
    "dpo": COMMON
    + f"--loss-type dpo_loss --ref-load {{ref}} --dpo-beta {BETA} --dpo-nll-coef {NLL}",
    "orpo": COMMON + "--loss-type orpo_loss --orpo-lambda 0.6",
    "kto": COMMON.replace("{data}", "{answers}")
    + f"--loss-type kto_loss --ref-load {{ref}} --kto-beta {BETA} --label-key completion "
    f"--desirable-key good --kto-desirable-weight {WEIGHTS[True]} "
    f"--kto-undesirable-weight {WEIGHTS[False]}",
    "rm": COMMON + f"--loss-type rm_loss --rm-center-coef {CENTER} --margin-key margin",
}
GOOD = (True, False, False, True)


def margin(place: int) -> float:
    return 0.25 * place


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("pairs")
    tokenizer = make_tokenizer()
    names = {"model": folder / "model", "ref": folder / "ref", "data": folder / "pairs.jsonl"}
    for seed, name in enumerate(("model", "ref")):
        make_model(tokenizer, hidden_size=32, num_layers=2, seed=seed).save_pretrained(names[name])
        tokenizer.save_pretrained(names[name])
    keys = ("prompt", "chosen", "rejected", "margin")
    rows = [dict(zip(keys, (*pair, margin(place)))) for place, pair in enumerate(PAIRS)]
    names["data"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    names["answers"] = folder / "answers.jsonl"
    answers = [
        {"prompt": row["prompt"], "completion": row["chosen"], "good": good}
        for row, good in zip(rows, GOOD)
    ]
    names["answers"].write_text("".join(json.dumps(row) + "\n" for row in answers))
    return {
        "flags": {kind: words.format(**names) for kind, words in KINDS.items()},
        "out": str(folder),
        "folders": list(map(str, names.values())),
    }


@pytest.fixture(scope="module")
def one(arguments: dict[str, Any]) -> dict[str, Any]:
    folder = Path(arguments["out"]) / "one"
    (found,) = run_ranks("tests.dist.pairs_worker:one_rank", 1, folder, arguments, timeout_s=300)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, arguments: dict[str, Any], one: dict[str, Any]
) -> list[dict[str, Any]]:
    """In the layouts of the tests that are to run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [i.callspec.params for i in items if i.function is test_two_ranks]
    cases = [f"{each['kind']} | {each['name']}" for each in params]
    folder, more = Path(arguments["out"]) / "two", {**arguments, "cases": cases}
    return run_ranks("tests.dist.pairs_worker:two_ranks", 2, folder, more, timeout_s=500)


def answer_log_probs(model: Any, tokenizer: Any, prompt: str, answer: str) -> torch.Tensor:
    """[R] of the answer's tokens and the end, by transformers in float64."""
    question, ids = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, answer))
    ids = [*ids, tokenizer.eos_token_id]
    tokens = torch.tensor([[*question, *ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(question) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_one_process_has_the_loss_of_a_loop_over_transformers(
    arguments: dict[str, Any], one: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arguments["folders"][0])
    models = [AutoModelForCausalLM.from_pretrained(f).double() for f in arguments["folders"][:2]]
    losses, margins = [], []
    for prompt, chosen, rejected in PAIRS:
        policy, ref = (
            [answer_log_probs(model, tokenizer, prompt, text) for text in (chosen, rejected)]
            for model in models
        )
        h = float((policy[0] - ref[0]).sum() - (policy[1] - ref[1]).sum())
        losses.append(math.log1p(math.exp(-BETA * h)) - NLL * float(policy[0].mean()))
        margins.append(BETA * h)
    metrics = one["dpo | one"]["metrics"]
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=EXACT)
    assert metrics["pair_margin"] == pytest.approx(sum(margins) / len(margins), rel=EXACT)
    right = sum(m > 0 for m in margins)
    assert metrics["pair_accuracy"] == pytest.approx(right / len(margins))
    assert one["dpo | norm"] > 1e-2 and min(map(abs, margins)) > 1e-3


def test_orpo_is_the_loss_of_a_loop_over_transformers(
    arguments: dict[str, Any], one: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arguments["folders"][0])
    model = AutoModelForCausalLM.from_pretrained(arguments["folders"][0]).double()
    losses, odds = [], []
    for prompt, *answers in PAIRS:
        means = [float(answer_log_probs(model, tokenizer, prompt, a).mean()) for a in answers]
        logits = [math.log(math.exp(a) / (1 - math.exp(a))) for a in means]
        odds.append(logits[0] - logits[1])
        losses.append(-means[0] + 0.6 * math.log1p(math.exp(-odds[-1])))
    metrics = one["orpo | one"]["metrics"]
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=EXACT)
    assert metrics["log_odds_ratio"] == pytest.approx(sum(odds) / len(odds), rel=EXACT)
    assert one["orpo | norm"] > 1e-2


def test_kto_is_the_loss_of_a_loop_over_transformers(
    arguments: dict[str, Any], one: dict[str, Any]
) -> None:
    """Its reference point is of the answers of the rows that follow."""
    tokenizer = AutoTokenizer.from_pretrained(arguments["folders"][0])
    models = [AutoModelForCausalLM.from_pretrained(f).double() for f in arguments["folders"][:2]]

    def log_ratio(prompt: str, answer: str) -> float:
        policy, ref = (answer_log_probs(m, tokenizer, prompt, answer).sum() for m in models)
        return float(policy - ref)

    rows = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
    mismatched = [log_ratio(rows[i][0], rows[(i + 1) % len(rows)][1]) for i in range(len(rows))]
    point = max(0.0, sum(mismatched) / len(rows))
    losses = []
    for (prompt, answer), good in zip(rows, GOOD):
        x = BETA * (log_ratio(prompt, answer) - point) * (1 if good else -1)
        losses.append(WEIGHTS[good] * (1 - 1 / (1 + math.exp(-x))))
    metrics = one["kto | one"]["metrics"]
    assert metrics["reference_point"] == pytest.approx(point, rel=EXACT) and point > 0.1
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=EXACT)
    assert one["kto | norm"] > 1e-3


def test_a_reward_model_scores_the_last_token_of_an_answer(
    arguments: dict[str, Any], one: dict[str, Any]
) -> None:
    """Its hidden state by transformers, times the head of `give_head`."""
    folder = arguments["folders"][0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).double().model
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).double()[0]
    losses, margins = [], []
    for place, (prompt, *answers) in enumerate(PAIRS):
        scores = []
        for answer in answers:
            texts = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, answer))
            ids = [*itertools.chain(*texts), tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).last_hidden_state[0, -1] @ head))
        margins.append(scores[0] - scores[1])
        loss = math.log1p(math.exp(-margins[-1] + margin(place)))
        losses.append(loss + CENTER * sum(scores) ** 2)
    metrics = one["rm | one"]["metrics"]
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=EXACT)
    assert metrics["pair_margin"] == pytest.approx(sum(margins) / len(margins), rel=EXACT)
    right = sum(m > 0 for m in margins)
    assert metrics["pair_accuracy"] == pytest.approx(right / len(margins))
    assert one["rm | norm"] > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONE)
def test_the_cut_of_a_step_does_not_matter(one: dict[str, Any], name: str, kind: str) -> None:
    check(one[f"{kind} | {name}"], one[f"{kind} | one"])


QUICK = (
    ("dpo", "DP2 budget"),
    ("rm", "CP2"),
    ("kto", "DP2"),
    ("kto", "CP2 budget"),
    ("orpo", "CP2"),
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.extended)
        for kind in KINDS
        for name in TWO
    ],
)
def test_two_ranks(one: dict[str, Any], two: list[dict[str, Any]], kind: str, name: str) -> None:
    for rank in two:
        check(rank[f"{kind} | {name}"], one[f"{kind} | one"])


def check(found: dict[str, Any], one: dict[str, Any]) -> None:
    assert found["apart"] <= EXACT
    for name, value in one["metrics"].items():
        if not name.startswith("perf/"):
            assert found["metrics"][name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
