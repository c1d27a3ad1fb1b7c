"""Benchmarks: data sets, runner and report."""
