"""Measuring many calls well: what the self-test runs, and on what."""
