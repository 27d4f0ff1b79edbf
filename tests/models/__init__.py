"""Models that a user would bring, each in place of the trainers' `model.py`."""
