"""From a rollout to the train batches of each rank."""
