"""Who shares memory with whom, when it is free again, and where it lies."""
