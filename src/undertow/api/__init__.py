"""What users call. Every function is built from the stages of `pipeline.py`."""
