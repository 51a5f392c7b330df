"""Number of micro-batches per optimizer step, for an assumed length distribution."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arguments.rules.rows import file_of
from arguments.run_config import RunConfig
from arguments.schema import DataConfig
from slime_like.config import ConfigError, Problem
from slime_like.data.factory import run_image_processor, run_tokenizer
from slime_like.data.prompts import row_images
from slime_like.data.row_images import RowImages
from slime_like.data.values import dotted, with_paths
from slime_like.distributed.seqlen_balancing import (
    imbalance,
    members,
    pack_by_budget,
    partition,
    sequence_costs,
    unit_sums,
)
from slime_like.megatron.micro_batching import micro_batch_size, work_per_token

CHARACTERS_PER_TOKEN = 4.0  # for English text, if prompts cannot be tokenised here
PROMPTS_READ = 10_000
ROWS_WITH_IMAGES = 1_000  # of which the files' headers are read
DEFAULT_PROMPT = 256  # tokens, without prompts and --rollout-max-prompt-len
LENGTHS = "--preflight-lengths"


@dataclass(frozen=True, slots=True)
class PlannedBatches:
    """Micro-batches of one optimizer step."""

    longest: int  # tokens of a sample
    mean: float  # tokens of a sample
    samples: int  # number in the step
    steps: int
    number: int  # micro-batches on every data-parallel rank
    tokens: int  # capacity of the largest micro-batch, over all context-parallel ranks
    # filled share of the token budget, of `budget` tokens over all context-parallel ranks; both
    # None without one
    used: float | None
    budget: int | None
    imbalance: float  # work of the busiest data-parallel rank divided by the mean
    prompts: str  # source of the prompt lengths


def batches_of(config: RunConfig) -> PlannedBatches:
    """Compute the micro-batches. Raises ConfigError for an invalid length distribution."""
    samples = config.algorithm.global_batch_size or 1
    lengths, source = sample_lengths(config, samples)
    size = micro_batch_size(
        config.algorithm, config.parallel.context_parallel_size, forward_only=False
    )
    dp = config.data_parallel_size
    costs = sequence_costs(
        lengths, work_per_token(config.megatron.transformer, config.gpt.vocab_size or 0)
    )
    if config.algorithm.balance_data:
        parts = partition(unit_sums(costs, size.together), dp, equal_counts=size.tokens is None)
    else:
        parts = np.array_split(np.arange(samples // size.together), dp)
    parts = [members(part, size.together) for part in parts]
    loads = np.array([costs[part].sum() for part in parts])
    longest = longest_sequence(config)
    if size.tokens is None:
        number = samples // dp // size.samples
        used = None
        tokens = size.samples * longest
    else:
        units = [unit_sums(lengths[part], size.together) for part in parts]
        number = max(len(pack_by_budget(of_rank, size.tokens)) for of_rank in units)
        if config.virtual_stages:
            number += -number % config.parallel.pipeline_model_parallel_size
        used = float(lengths.sum() / (dp * number * size.tokens))
        tokens = max(size.tokens, size.together * longest)
    return PlannedBatches(
        longest=longest,
        mean=float(lengths.mean()),
        samples=samples,
        steps=config.algorithm.num_steps_per_rollout or 1,
        number=max(1, number),
        tokens=tokens,
        used=used,
        budget=size.tokens,
        imbalance=imbalance(loads),
        prompts=source,
    )


def sample_lengths(config: RunConfig, count: int) -> tuple[NDArray[np.int64], str]:
    """[count] tokens of prompt and response, deterministic; and the source of the prompt
    lengths."""
    random = np.random.default_rng(0)
    prompts, source = prompt_lengths(config)
    drawn = random.choice(prompts, size=count)
    if config.learns_conversations:  # prompt and response together
        return drawn, source
    return drawn + response_lengths(config, count, random), source


def response_lengths(
    config: RunConfig, count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    longest = config.rollout.rollout_max_response_len
    distribution = config.preflight.preflight_lengths
    if distribution == "full":
        return np.full(count, longest)
    if distribution == "uniform":
        return random.integers(1, longest, size=count, endpoint=True)
    name, *parameters = distribution.split(":")
    try:
        median, sigma = map(float, parameters)
        if name != "lognormal" or not (median > 0 and 0 <= sigma < math.inf):
            raise ValueError
    except ValueError:
        message = "unknown distribution; legal values: uniform, full, lognormal:MEDIAN:SIGMA"
        raise ConfigError([Problem(LENGTHS, distribution, message)]) from None
    drawn = random.lognormal(math.log(median), sigma, size=count)
    return np.clip(drawn, 1, longest).astype(np.int64)


def longest_sequence(config: RunConfig) -> int:
    """Maximum tokens of prompt and response, or of a training conversation."""
    limit = prompt_limit(config)
    return limit if config.learns_conversations else limit + config.rollout.rollout_max_response_len


def prompt_limit(config: RunConfig) -> int:
    """Maximum tokens of an accepted prompt."""
    limits = [each.rollout_max_prompt_len for each in config.data_configs or (config.data,)]
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits):
        return max(known)
    return max([int(prompt_lengths(config)[0].max()), *known])


def prompt_lengths(config: RunConfig) -> tuple[NDArray[np.int64], str]:
    """Prompt lengths in tokens, estimated from the characters and images of the first rows of
    --prompt-data if it is a file; otherwise a single length. Of a mix, each source has its share of
    them, as in the first rollout in which it has a weight. Raises ConfigError."""
    sources = config.prompt_sources
    if not sources:
        return _lengths_of(config, config.data)
    parts = [_lengths_of(config, each) for each in config.data_configs]
    weights = [next(filter(None, source.weight.values())) for source in sources]
    lengths = [
        np.resize(part, max(1, round(PROMPTS_READ * weight / sum(weights))))
        for (part, _), weight in zip(parts, weights)
    ]
    texts = [f"{source.name} ({text})" for source, (_, text) in zip(sources, parts)]
    return np.concatenate(lengths), "; ".join(texts)


def _lengths_of(config: RunConfig, data: DataConfig) -> tuple[NDArray[np.int64], str]:
    """`prompt_lengths` of one source."""
    path = data.prompt_data
    limit = data.rollout_max_prompt_len
    key = data.input_key
    count = PROMPTS_READ if config.gpt.vision is None else ROWS_WITH_IMAGES
    rows = list(_rows(path, key, count)) if path is not None else []
    rows = [row for row in rows if _characters(row.get(key)) is not None]
    if not rows:
        length = limit or DEFAULT_PROMPT
        return np.array([length]), f"{length} tokens each"
    images = _image_reader(config, data)
    characters = np.array([_characters(row[key]) for row in rows])
    lengths = np.ceil(characters / CHARACTERS_PER_TOKEN).astype(np.int64)
    source = f"{path}, {CHARACTERS_PER_TOKEN:g} characters a token"
    if images is not None:
        of_images = np.array([_image_tokens(row, key, images) for row in rows])
        source += f", {of_images.mean():.0f} tokens of images"
        lengths = lengths + of_images
    kept = lengths[lengths <= limit] if limit is not None else lengths
    kept = np.maximum(kept if kept.size else lengths[:1], 1)
    return kept, source


def _rows(spec: str, key: str, count: int) -> Iterator[dict[str, Any]]:
    """The first rows of a data source's file, without those that cannot be read: the run names
    them, unless --skip-bad-rows. key: of the prompt, which may be a path into nested objects."""
    file = file_of(spec)
    if not file.is_file():
        return
    rows: Iterator[object] = iter(())
    if file.suffix == ".jsonl":
        rows = _json_rows(file)
    elif file.suffix == ".parquet":
        rows = _parquet_rows(file, count)
    objects = (row for row in rows if isinstance(row, dict))
    yield from (with_paths(row, dotted([key])) for row in itertools.islice(objects, count))


def _json_rows(file: Path) -> Iterator[object]:
    with file.open("rb") as lines:
        for line in lines:
            # of a blank line, of one that is no UTF-8 or no JSON, of too deep nesting
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line.decode("utf-8-sig"))


def _parquet_rows(file: Path, count: int) -> Iterator[object]:
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:  # which the run itself will ask for
        return
    with contextlib.suppress(pa.ArrowException, OSError), ParquetFile(file) as table:
        for batch in itertools.islice(table.iter_batches(batch_size=count), 1):
            for place in range(batch.num_rows):
                # of a value that Python cannot hold
                with contextlib.suppress(ValueError, OverflowError, TypeError, LookupError):
                    yield from batch.slice(place, 1).to_pylist()


def _characters(prompt: object) -> int | None:
    """Of a text or of messages; None for other things."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(_text(m.get("content", ""))) for m in prompt if isinstance(m, dict))
    return None


def _text(content: object) -> str:
    """Of a message; images are counted by themselves."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _image_reader(config: RunConfig, data: DataConfig) -> RowImages | None:
    """Takes images out of rows; None without --multimodal-keys."""
    if config.gpt.vision is None:
        return None
    assert data.prompt_data is not None
    try:
        processor = run_image_processor(config, run_tokenizer(config))
    except ValueError as error:
        problem = Problem("--hf-checkpoint", config.model.hf_checkpoint, str(error))
        raise ConfigError([problem]) from error
    return row_images(processor, data, data.prompt_data)


def _image_tokens(row: dict[str, Any], key: str, images: RowImages) -> int:
    """Of the files' headers; 0 for a row that the run will refuse, naming it."""
    try:
        return sum(images.counts(images.split(row, [key])[1]))
    except ValueError:
        return 0
