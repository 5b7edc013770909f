"""Finding or making the step that fits a call."""
