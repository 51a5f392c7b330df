"""Text environments: model output is the action, the text it reads is the observation."""
