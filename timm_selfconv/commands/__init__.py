"""Arguments and actions of the commands of ``timm-selfconv``; :mod:`timm_selfconv.cli` collects them.

In any module here whose name has no underscore, a command NAME is two functions:

    add_NAME(parser)    declares its arguments; what they accept is checked there (``type``)
    run_NAME(args)      does it; its docstring is the help; a ValueError or an OSError ends in one line, exit status 2

torch, timm, matplotlib and what imports them is imported in ``run_NAME``, once all that needs none of it is checked.
_shared has what several commands take.
"""
