"""`python -m slime_like.server` is `python -m slime_like.tinker`."""

from slime_like.tinker.__main__ import main

if __name__ == "__main__":
    main()
