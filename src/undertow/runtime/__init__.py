"""Programs, run."""
