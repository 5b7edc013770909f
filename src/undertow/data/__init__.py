"""Data to train on: files in conventional layouts as examples with targets. Imports torch and file formats only.

Files are not trusted: sizes are checked before anything is allocated, and nothing is unpickled.
"""
