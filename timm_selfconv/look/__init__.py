"""Analysis of what a net sees.

- attention_maps: where every query looks, in every layer; transformers: what of timm's can be read, and how.
- heads: what every head does, and how convolutional the layers are.
- explorer: one page in which a pointer over a picture lights up all maps (its parts lie in page).
- theorem: one page on which a convolution and the heads that are it work side by side.
- figures: the papers' figures, for any net with attention. gallery: some of them.
- repository: all of these as a net's repository on the Hub.
"""
