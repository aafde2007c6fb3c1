"""The benchmarks: `python -m bench --help` in a clone, and bench/README.md on what they mean."""
