__version__ = '0.3.0.dev0'  # the next release; the Hub's repositories have the tag v0.3.0
