"""Removes a run from the Engine when the command that started it is gone, even by SIGKILL.

engine.run starts it with a pipe as standard input: the pipe closes when that command ends.
"""

import contextlib
import sys

from muster import engine
from muster.errors import MusterError


def main() -> None:
    sys.stdin.buffer.read()
    # with the Engine gone as well, the next command's sweep finds what is left
    with contextlib.suppress(MusterError):
        engine.connect().remove_run(sys.argv[1])


if __name__ == "__main__":
    main()
