"""The commands of ``timm-selfconv``, one function each; :mod:`timm_selfconv.cli` makes the parser of them.

A new command is a function under ``@command(GROUP, *ARGUMENTS)`` of _shared, and a new module of commands a name in
cli.MODULES. Its docstring begins with a verb and ends with an example. A ValueError or an OSError ends in one line and
exit status 2.
"""
