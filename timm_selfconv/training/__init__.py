"""Training on one device, by the recipes that timm's train.py takes; ``python -m timm_selfconv.train`` is the command.

- recipes: the table of keys, and how a recipe is read.
- net: the net of a recipe, its whitened stem, its optimiser.
- augment: crops, flips, erasing and mixing of batches on the device.
- trainer: ``Training``, the epochs of a net. output: the folder of a run, its checkpoints, history and logs.
- runs: a run from beginning to end, and its result. picture_folder: pictures of one's own, checked.
- distillation: a trainer of nets that have a teacher.
"""
