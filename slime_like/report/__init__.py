"""A run as one HTML page: `slime-like report RUN_DIR`. Reads files of run folders and nothing else;
needs neither torch nor the trainer."""
