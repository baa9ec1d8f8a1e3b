"""Benchmarks: how fast, in how much memory, against whom. No claim is settled here."""
