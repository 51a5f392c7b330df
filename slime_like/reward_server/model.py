"""A reward model of transformers, and the batches in which it scores requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from slime_like.errors import RunError


class BadText(ValueError):
    """A request without tokens that the model can read."""


class NoScore(RunError):
    """The model's score of a text is no finite number, and would not be the next time."""


class RewardModel:
    """A one-label model of transformers.

    Args:
        folder: As --save-hf of ``--policy-loss-type bradley_terry`` writes it.

    Raises:
        RunError: The folder has no trained score layer of one label.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=dtype, output_loading_info=True
            )
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} is no reward model: {error}") from None
        if missing := sorted(loaded["missing_keys"]):  # transformers makes them at random
            raise RunError(f"{folder} is no reward model: its weights have no {missing[0]}")
        if model.config.num_labels != 1:
            raise RunError(f"{folder} has {model.config.num_labels} labels; a reward model has one")
        if not hasattr(model, "score"):  # encoders have a classifier, of their first token
            raise RunError(
                f"{folder} is a {type(model).__name__}, without the score layer of a decoder; "
                "serve one that --loss-type rm_loss has trained, or another with one label"
            )
        self._model = model.eval().to(device)
        # as the trainer's head: scores near 20 are 0.125 apart in bfloat16, and equal ones of a
        # group teach nothing
        self._model.score.float()
        self._device = device
        config = model.config.get_text_config()
        self._vocabulary: int = config.vocab_size
        self._longest: int = getattr(config, "max_position_embeddings", None) or 2**31

    def check(self, tokens: object) -> list[int]:
        """A text's tokens. Raises BadText if they are not."""
        if not isinstance(tokens, list) or not tokens:
            raise BadText("input_ids must be a list of token ids, or of such lists")
        if len(tokens) > self._longest:
            raise BadText(f"{len(tokens)} tokens; the model reads at most {self._longest}")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise BadText(f"{token!r:.40} is no token of a vocabulary of {self._vocabulary}")
        return tokens

    @torch.inference_mode()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Score of each text, at its last token. Texts are padded on the right, where no token of
        theirs attends."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(self._device)
        body = getattr(self._model, self._model.base_model_prefix)
        hidden: Tensor = body(tokens.to(self._device), attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(texts)), lengths - 1]
        return self._model.score(last.float()).squeeze(-1).tolist()


class Batches:
    """Scores requests one batch after the other; those that wait meanwhile are the next batch.

    Args:
        tokens: Most tokens of a batch, padding included.
    """

    def __init__(self, model: RewardModel, tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    async def score(self, text: list[int]) -> float:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        self._arrived.set()
        return await future

    async def run(self) -> None:
        """Serve forever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            batch = self._next()
            texts = [text for text, _ in batch]
            try:
                scores = await loop.run_in_executor(self._thread, self._model.scores, texts)
            except Exception as error:  # out of memory; the next batch may be smaller
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RunError(f"{type(error).__name__}: {error}"))
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if future.done():  # its client has gone
                    continue
                if math.isfinite(score):
                    future.set_result(score)
                else:
                    future.set_exception(NoScore(f"the model's score of the text is {score}"))

    def _next(self) -> list[tuple[list[int], asyncio.Future[float]]]:
        """The oldest requests that fit; at least one."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        count = longest = 0
        for text, _ in self._waiting:
            longest = max(longest, len(text))
            if count and longest * (count + 1) > self._tokens:
                break
            count += 1
        batch = self._waiting[:count]
        del self._waiting[:count]
        if not self._waiting:
            self._arrived.clear()
        return batch
