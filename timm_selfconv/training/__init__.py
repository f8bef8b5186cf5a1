"""Training on one device, by the recipes that timm's train.py takes; ``python -m timm_selfconv.train`` is the command.

- recipes: where recipes lie, and the table of the keys that they may have.
- net: the net of a recipe, for the classes of the data.
- trainer: ``Training``, a net and all that changes while it trains, with checkpoints and a history.
- runs: a run from beginning to end, and what it leaves. picture_folder: pictures of one's own, checked.
- augment: crops, flips and erasing on the device.
- initialization: a stem that begins as a whitening transform. optimization: learning rates of positions and content.
- distillation: what a net learns from a teacher besides labels.
"""
