"""Worlds: a corpus to search, targets to ask about, questions to train on and to measure with."""
