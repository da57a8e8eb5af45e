"""Programs that tests run without an interpreter's start: forked from a process that has imported what takes long.

`run([sys.executable, "-m", module, …])` is as `subprocess.run`, and `Program` as `subprocess.Popen`. What is forked,
and what it starts itself (torchrun, and torchrun its ranks), are processes with signals, sessions, and ends as real
ones, and begin as a fresh interpreter does, see `fresh`. Their parent is the server, which ends what a program leaves
behind; /proc shows another command line and environment, and inductor compiles in the process itself. Commands that
`Command.from_line` does not know start as always.
"""

from tests.support.programs.program import Program, children_forked, output_of, run, run_module

__all__ = ["Program", "children_forked", "output_of", "run", "run_module"]
