"""Servers of the run, of any kind: processes, HTTP, pool, requests."""
