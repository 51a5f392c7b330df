"""A served reward model: its score of the tokens of prompt and response.

The model is one that ``--policy-loss-type bradley_terry`` has trained, or any with a single label
and the policy's tokenizer. It is behind SGLang (``--is-embedding``), vLLM or
``slime-like reward-server``. All three have ``POST /classify``; the request has the fields of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from slime_like.rewards.limit import as_float
from slime_like.rewards.remote import require_url
from slime_like.rewards.reward_server import AnsweredOnce, OutOfTime, RewardServer, certificates
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
        self._comparison: TokenizerComparison | None = None  # until the server answered it
        if "hf_checkpoint" in args.settings:
            trust = "trust_remote_code" in args.settings and bool(args.trust_remote_code)
            self._comparison = TokenizerComparison(url, str(args.hf_checkpoint), trust)
            with contextlib.suppress(OutOfTime):  # it may still be starting
                asyncio.run(self._compare(_PROBE_S))

    async def score(self, args: RewardArgs, sample: SlimeSample) -> float:
        """The score of prompt and response. Raises RuntimeError if there is none, ValueError as the
        constructor does, if the server did not answer then."""
        await self._compare(args.rm_timeout_s)
        return await self._answers.score(request_of(sample.tokens))

    async def _compare(self, timeout_s: float) -> None:
        if self._comparison is not None:
            await self._comparison.run(timeout_s)
            self._comparison = None

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
    return [as_float(x) for x in scores]


def classify_url(url: str) -> str:
    """The URL with /classify, if it has no path."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else urlunsplit(parts._replace(path=CLASSIFY))


class TokenizerComparison:
    """Whether a server makes the same tokens of a text as the policy. Tokens of another vocabulary
    would be graded without any sign of it.

    Args:
        url: Of /classify; /tokenize is beside it.
        folder: Of the policy.
    """

    def __init__(self, url: str, folder: str, trust_remote_code: bool) -> None:
        from transformers import AutoTokenizer

        parts = urlsplit(url)
        self._url = url
        self._path = urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/tokenize"))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self._text = PROBE
        self._tokens = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        if tokenizer.decode(self._tokens) != PROBE:  # what a vocabulary lacks, loaders drop or mark
            self._text = PROBE.encode("ascii", "ignore").decode()
            self._tokens = list(tokenizer(self._text, add_special_tokens=False)["input_ids"])

    async def run(self, timeout_s: float) -> None:
        """Raises ValueError if it makes others, OutOfTime if it does not answer. A server that
        makes no tokens of text is not compared, which is printed."""
        body = {"prompt": self._text, "add_special_tokens": False}
        try:
            answer = await RewardServer(self._path, timeout_s).post(body)
            remote = list(answer["tokens"])
        except OutOfTime:
            raise
        except (RuntimeError, TypeError, KeyError) as error:
            print(
                "the reward model's tokenizer is not compared with the policy's, for the server "
                f"does not tokenize text: {error}",
                file=sys.stderr,
            )
            return
        if remote != self._tokens:
            raise ValueError(
                f"the reward model at {mask_url(self._url)} has another tokenizer than the policy: "
                f"it makes {len(remote)} tokens of a text of which the policy makes "
                f"{len(self._tokens)}, or other ones; serve one with the policy's tokenizer, or "
                "use --rm-type remote_rm, which sends text"
            )
