"""Validate JSON of servers and files, which may be faulty: pydantic models describe it.

For any input, an error is one line that names the field, its value and what is legal. Models read
bytes, so that pydantic parses and checks a response in one pass and builds no objects for fields
that nobody reads.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_like.text import SHOWN, clean, shown

LOWEST_LOG_PROB = -1e6  # far below any log-prob that occurs, and exact in float32
HIGHEST_LOG_PROB = 1e-3  # rounding may give a log-prob slightly above 0

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
LogProb = Annotated[float, Field(ge=LOWEST_LOG_PROB, le=HIGHEST_LOG_PROB, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
ShortText = Annotated[str, Field(max_length=1000)]
# a list that is not read beyond its first invalid item
Items = Annotated[list[T], Field(fail_fast=True)]


class InvalidResponse(ValueError):
    """A response with status 200 but invalid content. The message is one line. kind: a short name
    for counting."""

    kind = "bad_answer"


class NotJson(InvalidResponse):
    kind = "no_json"


class WrongWeightVersion(InvalidResponse):
    """Tokens with a weight version that was never sent or cannot have generated them."""


class StrictModel(BaseModel):
    """Base of the models: numbers and text are not converted into each other, unknown fields are
    ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


def read(model: type[M], response: object) -> M:
    """Validate a response.

    Args:
        model: What it must be.
        response: JSON as bytes, whose size is limited by the reader (`http.py`), or parsed.

    Raises:
        NotJson: The bytes are no JSON, or are nested more than 200 levels deep.
        InvalidResponse: A field is missing or invalid.
    """
    try:
        if isinstance(response, bytes):
            return model.model_validate_json(response)
        return model.model_validate(response)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            assert isinstance(response, bytes)
            start = shown(response[:SHOWN].decode("utf-8", "replace"))
            raise NotJson(f"invalid JSON ({first['ctx']['error']}): {start}") from None
        raise InvalidResponse(problems_of(error)[0]) from None


def problems_of(error: ValidationError) -> list[str]:
    """Each problem: field, value and what is legal."""
    problems = []
    for found in error.errors(include_url=False):
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in found["loc"])
        name = clean(place.removeprefix("."), SHOWN) or "the content"
        if found["type"] == "missing":
            problems.append(f"{name} is missing")
        else:
            problems.append(f"{name} is {shown(found['input'])}: {clean(found['msg'], SHOWN)}")
    return problems
