"""Controllers: they act, and learn to act inside a world model's imagination."""
