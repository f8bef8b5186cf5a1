"""Training on one device with the recipes of timm's train.py (``timm-selfconv train``).

- recipes: keys, and reading of recipes.
- net: model of a recipe, stem whitening, optimizer.
- augment: crops, flips, erasing and mixing of batches on the device.
- trainer: ``Training``, the loop over epochs. output: checkpoints, history and logs of a run.
- runs: runs a recipe and writes the result. picture_folder: opens and checks a folder of pictures.
"""
