# Functions of the demos, which source this file after they have set PYTHON, RANKS and PARALLEL.

STARTED=$SECONDS

# Prints a command as a user would type it, then runs it.
show() { printf '\n$ %s\n' "$*"; "$@"; }
train() { show "$PYTHON" -m slime_like.torchrun --standalone --nproc-per-node "$RANKS" train.py "${PARALLEL[@]}" "$@"; }
say() { printf '\n[%s s] %s\n' "$((SECONDS - STARTED))" "$*"; }
