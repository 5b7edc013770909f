"""Several processes: who holds which shards, how they talk, and how they notice that one of them is gone."""
