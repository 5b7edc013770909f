"""From Python code to a Program."""
