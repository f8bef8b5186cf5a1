"""Measures of a net's cost and accuracy.

- counting: parameters and FLOPs, each by a named convention.
- published: what the papers' tables say. tables: those tables, beside what is measured here.
- evaluation: accuracy on a dataset.
- bench: how much faster one net, or one path of its attention, is than another.
"""
