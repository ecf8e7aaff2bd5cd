"""Benchmarks of this machine: every figure beside its mark from the same run."""
