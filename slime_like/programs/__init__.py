"""Programs of episodes: processes that are separated from each other, started or forked."""
