"""What users call. `planning` spells the pipeline out; the others are built from the same stages."""
