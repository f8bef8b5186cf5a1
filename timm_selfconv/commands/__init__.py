"""The commands of ``timm-selfconv``, one function each; :mod:`timm_selfconv.cli` makes a parser for them.

A new command is a function under ``@command(GROUP, *ARGUMENTS)`` of _shared; cli.MODULES lists the modules of commands.
The docstring begins with a verb and has an example. A ValueError or an OSError ends in one line and exit status 2.
"""
