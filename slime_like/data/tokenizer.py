"""The tokenizer of a run: loading with clear errors, a check against the model, and its identity
for checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REMEDY = "copy the model's tokenizer files into it (tokenizer.json, tokenizer_config.json)"
# vocabulary files; without one transformers creates a tokenizer with a single token
VOCABULARY_FILES = (
    "tokenizer.json",
    "tekken.json",
    "vocab*",
    "bpe.codes",
    "dict.txt",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.spm",
)


def load_tokenizer(folder: str, *, vocab_size: int | None, trust_remote_code: bool) -> object:
    """Load the tokenizer in a Hugging Face folder.

    Args:
        folder: Of --hf-checkpoint.
        vocab_size: Rows of the model's embedding; None skips the comparison.
        trust_remote_code: Whether the folder's own code may run.

    Returns:
        transformers' tokenizer.

    Raises:
        ValueError: Names the folder, if its tokenizer is missing, damaged, or another model's.
    """
    from transformers import AutoTokenizer

    if not _has_vocabulary(Path(folder), trust_remote_code):
        raise ValueError(f"--hf-checkpoint {folder}: there is no tokenizer; {REMEDY}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        count = max(tokenizer.get_vocab().values(), default=-1) + 1
    except Exception as error:  # transformers and its dependencies raise nearly anything
        reason = (str(error).strip() or repr(error)).split("\n", 1)[0]
        raise ValueError(
            f"--hf-checkpoint {folder}: its tokenizer cannot be loaded "
            f"({type(error).__name__}: {reason:.300}); {REMEDY}"
        ) from error
    if count == 0:
        raise ValueError(f"--hf-checkpoint {folder}: there is no tokenizer; {REMEDY}")
    if vocab_size is not None and count > vocab_size:
        raise ValueError(
            f"--hf-checkpoint {folder}: the tokenizer has {count} tokens and the model "
            f"{vocab_size}, so it belongs to another model; {REMEDY}"
        )
    return tokenizer


def _has_vocabulary(folder: Path, trust_remote_code: bool) -> bool:
    """Whether the folder has a vocabulary; custom code may store it in any file."""
    if any(next(folder.glob(pattern), None) is not None for pattern in VOCABULARY_FILES):
        return True
    return trust_remote_code and next(folder.glob("*.py"), None) is not None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests that identify a tokenizer: of its vocabulary, its special tokens, and its chat
    template.

    Args:
        tokenizer: transformers'.

    Returns:
        "vocabulary", "special tokens" and "chat template", 24 hexadecimal digits each.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "vocabulary": _digest(vocabulary),
        "special tokens": _digest([special, list(tokenizer.all_special_ids)]),
        CHAT_TEMPLATE: _digest(getattr(tokenizer, "chat_template", None)),
    }


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    *,
    stopped: bool,
    skip_special_tokens: bool | None,
) -> str:
    """The text of a response as rewards and user functions see it.

    Special tokens belong to the text: a response that differs in them is another response, and if
    it had the same text, a reward could not object to them.

    Args:
        tokenizer: The policy's.
        tokens: Of the response, or of one of its turns.
        stopped: Whether a stop token or stop string ended it, as opposed to the length limit.
        skip_special_tokens: None leaves out the special token that ended the response, and no
            other; True leaves out all; False none (`SamplingParams.skip_special_tokens`).
    """
    tokens = list(tokens)
    if skip_special_tokens is None and stopped and tokens and _is_special(tokenizer, tokens[-1]):
        tokens.pop()
    return str(tokenizer.decode(tokens, skip_special_tokens=bool(skip_special_tokens)))


def _is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether `skip_special_tokens` leaves this token out."""
    texts = [tokenizer.decode([token], skip_special_tokens=skip) for skip in (True, False)]
    return texts[0] != texts[1]


def without_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text without special tokens, for a text of the model that becomes part of a prompt."""
    special = [str(tokenizer.convert_ids_to_tokens(i)) for i in special_token_ids(tokenizer)]
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    while special and pattern.search(text):  # what remains may form one again
        text = pattern.sub("", text)
    return text


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that `skip_special_tokens` leaves out. `all_special_ids` has only those
    with a role, such as the end of the text."""
    added = tokenizer.added_tokens_decoder.items()
    special = {token_id for token_id, token in added if token.special}
    return sorted(special.union(tokenizer.all_special_ids))


CHAT_TEMPLATE = "chat template"  # may differ between two runs of the same model, with a warning


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
