"""Client of SGLang servers: processes, HTTP, protocol."""
