"""SGLang's endpoints and wire format."""
