"""Analysis of a net's attention.

- attention_maps: the maps of all layers; transformers: which of timm's transformers can be read, and how.
- heads: statistics of every head, and how convolutional the layers are; findings: the papers' claims, measured.
- explorer: a page that shows all maps of the pixel under the pointer (page holds the parts of both pages).
- theorem: a page on which a convolution and the heads that are it work side by side.
- figures: the papers' figures, for any net with attention; gallery: some of them.
"""
