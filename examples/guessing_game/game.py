"""A multi-turn game over a reasoning-gym task with a numeric answer: the model guesses and is told
whether the answer is higher or lower.

    python train.py ... --prompt-data "reasoning_gym:chain_sum?size=1000" \
        --custom-generate-function-path examples/guessing_game/game.py:generate

A correct guess ends the game with reward 1 minus 0.1 for each earlier turn; a lost game has reward
0. Feedback is masked out of the loss. This example uses slime's convention; `examples/calculator`
uses ours.
"""

from __future__ import annotations

import re
from typing import Any

from slime_like.compat.slime.api import GenerateState, Sample, get_model_url, post

TURNS = 4
TURN_TOKENS = 24  # of one guess
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,6})?")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Play one game: alternate guesses of the model and feedback."""
    tokenizer = GenerateState(args).tokenizer
    prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    limit = sampling_params["max_new_tokens"]
    sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
    for turn in range(TURNS):
        sampling_params["max_new_tokens"] = min(TURN_TOKENS, limit - len(response))
        if sampling_params["max_new_tokens"] < 1:
            sample.status = Sample.Status.TRUNCATED
            break
        output = await post(
            get_model_url(args, "actor"),
            {"input_ids": prompt + response, "sampling_params": sampling_params},
        )
        written = output["meta_info"]["output_token_logprobs"]
        response += [token for _, token, _ in written]
        log_probs += [log_prob for log_prob, _, _ in written]
        loss_mask += [1] * len(written)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            break
        said = feedback(output["text"], sample.label)
        if said is None:
            sample.reward = 1 - turn / 10
            break
        if turn + 1 < TURNS:
            answer = tokenizer(said, add_special_tokens=False)["input_ids"][
                : max(0, limit - len(response))
            ]
            response += answer
            log_probs += [0.0] * len(answer)
            loss_mask += [0] * len(answer)
    sample.metadata["turns"] = turn + 1
    sample.tokens = prompt + response
    sample.response_length = len(response)
    sample.loss_mask, sample.rollout_log_probs = loss_mask, log_probs
    sample.response = tokenizer.decode(response)
    return sample


def feedback(text: str, label: Any) -> str | None:
    """Feedback to a guess; None if it is correct."""
    found = _NUMBER.findall(text)
    if not found:
        return "\nThat is no number. Guess again: "
    guess, answer = float(found[-1]), float(label)
    if guess == answer:
        return None
    return "\nIt is higher. Guess again: " if answer > guess else "\nIt is lower. Guess again: "
