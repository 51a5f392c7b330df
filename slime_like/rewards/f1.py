"""Token F1 of question answering (SQuAD, Rajpurkar et al. 2016, arXiv 1606.05250); ``f1`` in
slime."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping

ALONE = frozenset({"yes", "no", "noanswer"})  # graded by exact match only
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """F1 over words, 2 precision recall / (precision + recall), ignoring case, punctuation and
    articles."""
    words = plain_words(response)
    expected = plain_words(str(label))
    if words != expected and {" ".join(words), " ".join(expected)} & ALONE:
        return 0.0
    same = (Counter(words) & Counter(expected)).total()
    return 2 * same / (len(words) + len(expected)) if same else 0.0


def plain_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
