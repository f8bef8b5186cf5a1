"""What the commands of `timm-selfconv` do; :mod:`timm_selfconv.cli` has the words that they understand.

    nets      the net that a command was asked for
    zoo       list, tables: read files alone, without torch
    recipe    recipe: likewise
    look      classify, demo, heads, figures, curves, explore
    measure   eval, bench
    weights   export, include, prune
    finetune  finetune
    publish   publish
    scripts   run

A command NAME is the function `run_NAME` of its module, which is imported when it runs. What the user did wrong is a
ValueError or an OSError; it ends in one line.
"""
