"""What operations cost: arithmetic, measured times and workspace, the cache of both."""
