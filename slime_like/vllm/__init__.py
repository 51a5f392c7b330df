"""Client of vLLM servers."""
