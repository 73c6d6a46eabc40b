"""What invokew starts: Invoke, whose complaints about the command line exit with 2, as ours do."""

import sys
from typing import Any

from invoke.exceptions import Exit, ParseError
from invoke.program import Program

from muster.errors import ExitCode


class Muster(Program):
    """Invoke's own program; its status 1 would read as NOT READY."""

    def parse_core(self, argv: Any) -> None:  # noqa: ANN401  Invoke's own types say no more
        as_started = sys.dont_write_bytecode
        try:
            super().parse_core(argv)
        except ParseError as error:
            raise Exit(str(error), code=ExitCode.WRONG_INPUT) from None
        # Invoke turns byte code off, and all of Muster would be compiled anew at every start
        sys.dont_write_bytecode = as_started

    def parse_tasks(self) -> None:
        try:
            super().parse_tasks()
        except ParseError as error:
            raise Exit(str(error), code=ExitCode.WRONG_INPUT) from None


if __name__ == "__main__":
    Muster(name="Muster", binary="invokew").run()
