"""One question per file; run with `python -m benchmarks.<name>`."""
