"""Images of prompts: what a vision tower takes, and where its features go in a sequence."""
