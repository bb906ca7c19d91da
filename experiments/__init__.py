"""Commands: each file runs as `python -m experiments.NAME`."""
