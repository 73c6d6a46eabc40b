"""Removes a run from the Engine when the command that started it is gone, even by SIGKILL.

engine.run starts it with a pipe as standard input: the pipe closes when that command ends.
"""

import sys

from muster import engine


def main() -> None:
    sys.stdin.buffer.read()
    engine.connect().remove_run(sys.argv[1])


if __name__ == "__main__":
    main()
