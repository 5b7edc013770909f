"""The parameter server: parts of the parameters with a primary and backups each, and the protocol between them.

The decisions (`rules.py`, `state.py`, `controller.py`, `replica.py`) are plain Python: messages in, messages out.
The actors carry them out with Ray, and the tests explore them without it.
"""
