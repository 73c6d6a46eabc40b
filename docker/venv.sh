#!/bin/sh
# Makes /opt/venv from the lock and the wheels, and takes out in the same layer what no training
# needs. In the build: wheels, lock and lists under /tmp/context, binutils under /tmp/tools.
set -eu

context=/tmp/context
venv=/opt/venv

# bytecode is compiled at the end, all of it in one way
export PYTHONDONTWRITEBYTECODE=1

python3 -m venv --without-pip "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# pip runs out of its own wheel: Debian's Python has none. No index is asked, and every wheel is
# checked against the lock once more.
pip=$(echo "$context"/wheels/pip-*.whl)
"$venv/bin/python" "$pip/pip" install --no-index --find-links "$context/wheels" --no-deps \
    --require-hashes --requirement "$context/lock.txt" --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore

# The lists hold one glob a line, relative to site-packages; sh expands them unquoted.
cd "$packages"
lists=$context/trim.txt
if [ "${SLIM:-0}" = 1 ]; then
    lists="$lists $context/trim-slim.txt"
fi
# shellcheck disable=SC2086  # the names of lists, and globs that are meant to expand
sed -e 's/#.*//' $lists | while read -r glob; do
    rm -rf $glob
done
find . -name '*.a' -delete

# Symbols for debuggers: half a gigabyte in torch and triton alone.
LD_LIBRARY_PATH=/tmp/tools/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH
sed -e 's/#.*//' "$context/strip.txt" | while read -r glob; do
    for library in $glob; do
        if [ -f "$library" ]; then
            /tmp/tools/usr/bin/strip --strip-unneeded "$library"
        fi
    done
done
unset LD_LIBRARY_PATH

# Once and without times in it, since the user who runs cannot write it; unchecked, since nobody
# edits these files. One file of torch's own tests is written for Python 3.12.
"$venv/bin/python" -m compileall -q -f -j 0 --invalidation-mode unchecked-hash \
    -x 'torch/testing/_internal/py312_' "$venv/lib"

# where the suite's part of muster lies
echo /opt/muster/lib >"$packages/muster.pth"
