"""A served reward model: its score of the tokens of prompt and response.

The model is one that ``--policy-loss-type bradley_terry`` has trained, or any with a single label
and the policy's tokenizer. It is behind SGLang (``--is-embedding``), vLLM or
``slime-like reward-server``. All three have ``POST /classify``; the request has the fields of each.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from slime_like.rewards.remote import require_url
from slime_like.rewards.reward_server import AnsweredOnce, RewardServer, certificates
from slime_like.text import mask_url, shown

if TYPE_CHECKING:
    from slime_like.rewards.custom import RewardArgs
    from slime_like.samples.slime_sample import SlimeSample

CLASSIFY = "/classify"
PROBE = 'Straße 東京 αβγ: def f(x): return x**2  # 3.14159\n\t{"a": [1, 2]}'
_PROBE_S = 20.0


class RewardModelClient:
    """Client of the server. Raises ValueError without --rm-url, or if the server's tokenizer is not
    the policy's (args.hf_checkpoint)."""

    def __init__(self, args: RewardArgs) -> None:
        url = classify_url(require_url(args, "reward_model"))
        server = RewardServer(url, args.rm_timeout_s)
        certificates()
        self._server = server
        self._answers = AnsweredOnce(server, args.rm_cache_size, self._read)
        if "hf_checkpoint" in args.settings:
            trust = "trust_remote_code" in args.settings and bool(args.trust_remote_code)
            _compare_tokenizers(url, str(args.hf_checkpoint), trust)

    async def score(self, args: RewardArgs, sample: SlimeSample) -> float:
        """The score of prompt and response. Raises RuntimeError if there is none."""
        return await self._answers.score(request_of(sample.tokens))

    def _read(self, answer: Any) -> float:
        scores = scores_of(answer)
        if scores is None:
            raise self._server.failure(
                f"answered {shown(answer)}, which is neither SGLang's (embedding) nor vLLM's "
                "(data, probs) of one text"
            )
        if len(scores) != 1:
            raise self._server.failure(
                f"answered {len(scores)} scores for a text; a reward model has one label (SGLang "
                "without --is-embedding, or a model without a score layer, has other outputs)"
            )
        if not math.isfinite(scores[0]):
            raise self._server.failure(f"answered the score {scores[0]}")
        return scores[0]


def request_of(tokens: Sequence[int]) -> dict[str, object]:
    """Fields of SGLang (input_ids) and of vLLM (input), which is asked for the score itself, not
    for its softmax."""
    return {"input_ids": list(tokens), "input": list(tokens), "use_activation": False}


def scores_of(answer: Any) -> list[float] | None:
    """The scores of the text, by label; None for an answer of another form."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, Mapping) and isinstance(rows := answer.get("data"), list):
        answer = rows[0] if len(rows) == 1 else None
    if not isinstance(answer, Mapping):
        return None
    scores = answer.get("embedding", answer.get("probs"))
    if not isinstance(scores, list) or not all(type(x) in (int, float) for x in scores):
        return None
    return [float(x) for x in scores]


def classify_url(url: str) -> str:
    """The URL with /classify, if it has no path."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else urlunsplit(parts._replace(path=CLASSIFY))


def _compare_tokenizers(url: str, folder: str, trust_remote_code: bool) -> None:
    """Raise ValueError if the server makes other tokens of a text than the policy does. Tokens of
    another vocabulary would be graded without any sign of it."""
    from transformers import AutoTokenizer

    parts = urlsplit(url)
    probe_url = urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/tokenize"))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    local = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    probe = PROBE
    if tokenizer.decode(local) != PROBE:  # what a vocabulary lacks, loaders drop or mark
        probe = PROBE.encode("ascii", "ignore").decode()
        local = tokenizer(probe, add_special_tokens=False)["input_ids"]
    body = {"prompt": probe, "add_special_tokens": False}
    try:
        answer = asyncio.run(RewardServer(probe_url, _PROBE_S).post(body))
        remote = list(answer["tokens"])
    except (RuntimeError, TypeError, KeyError) as error:
        print(
            "the reward model's tokenizer is not compared with the policy's, for the server does "
            f"not tokenize text: {error}",
            file=sys.stderr,
        )
        return
    if remote != list(local):
        raise ValueError(
            f"the reward model at {mask_url(url)} has another tokenizer than the policy: it makes "
            f"{len(remote)} tokens of a text of which the policy makes {len(local)}, or other "
            "ones; serve one with the policy's tokenizer, or use --rm-type remote_rm, which sends "
            "text"
        )
