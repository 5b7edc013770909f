"""Data to train on. In: files in conventional layouts. Out: examples with targets.

Files are not trusted: sizes are checked before anything is allocated, and nothing is unpickled.
"""
