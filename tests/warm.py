"""Python processes that start at once: forks of one that has imported what takes long.

    python warm.py MODULE ...     reads arguments of python, a JSON list a line: ["-m", "timm_selfconv", "list"]
                                  answers each with [exit status, output, errors]

What libraries read from the environment when they are imported is the environment of the first process.
"""
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile


class WarmPython:
    """Runs commands as `subprocess.run([sys.executable, *arguments], env=environment)` does."""

    def __init__(self, environment, *modules):
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.process.communicate()

    def run(self, *arguments):
        self.process.stdin.write(json.dumps(arguments) + '\n')
        self.process.stdin.flush()
        return subprocess.CompletedProcess(arguments, *json.loads(self.process.stdout.readline()))


def become(arguments, *streams):
    """Go on as a process that python was started as with these arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    if arguments[0] == '-m':
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name='__main__', alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name='__main__')
    sys.exit()


if __name__ == '__main__':
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        with open(os.devnull) as nothing, tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
            child = os.fork()
            if child == 0:
                become(json.loads(line), nothing, out, err)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            err.seek(0)
            print(json.dumps([status, out.read(), err.read()]), flush=True)
