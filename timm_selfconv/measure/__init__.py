"""Cost, accuracy and speed of nets.

- counting: parameters and FLOPs. bench: speed.
- evaluation: accuracy on a dataset.
- published: the papers' tables. tables: these tables with measured numbers.
"""
