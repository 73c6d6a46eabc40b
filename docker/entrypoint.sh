#!/bin/sh
# The program takes this shell's place: it is PID 1 and gets every signal itself.
set -eu
exec "$@"
