"""The fixtures of tests/dist."""

from tests.dist.conftest import alone  # noqa: F401
