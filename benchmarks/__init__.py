"""What float8 costs: one registry of rows, one runner. `python -m benchmarks` says how."""
