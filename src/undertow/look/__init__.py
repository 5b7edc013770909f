"""What a trained network has learned: its filters, what triggers them, and by which pixels or characters.

In: a trained model and test data. Out: data (`looking.py`) and one HTML page (`page.py`).
"""
