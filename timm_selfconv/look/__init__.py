"""Analysis of a net's attention.

- attention_maps: the maps of all layers; transformers: support for timm's transformers.
- heads: statistics of each head and layer; findings: the papers' claims, measured.
- explorer: a page that shows the maps of the pixel under the pointer (page/ has the parts of both pages).
- theorem: a page that compares a convolution with the equal sum of attention heads.
- figures: the papers' figures, for any net with attention; gallery: examples.
"""
