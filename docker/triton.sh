#!/bin/sh
# Builds triton's driver helper into its cache, which is keyed by the source, the platform and the
# folder of libcuda: the image then compiles kernels without a C compiler. A stub stands in for the
# driver's library while linking. https://github.com/triton-lang/triton, runtime/build.py
set -eu

# Written by whoever trains, so it is everybody's, as /tmp is. Below /opt/triton: a copy of that
# folder's contents keeps the modes of what is in it.
cache=/opt/triton/var/cache/triton
mkdir -p /opt/triton/var/cache
install --directory --mode 1777 "$cache"

if ! /opt/venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)'; then
    exit 0 # --slim left triton out
fi

libcuda=/usr/lib/x86_64-linux-gnu
echo 'int cuInit(unsigned int flags) { return 100; }' |
    gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -x c - -o "$libcuda/libcuda.so.1"

TRITON_LIBCUDA_PATH=$libcuda TRITON_CACHE_DIR=$cache PYTHONDONTWRITEBYTECODE=1 \
    /opt/venv/bin/python -c '
from triton.backends.nvidia.driver import CudaUtils
try:
    CudaUtils()
except ImportError as error:
    # built and cached before it is loaded, and the stub has nothing to load it with
    print(error)
'
# the helper, or no image
ls "$cache"/*/cuda_utils*.so
# a lock file that a build leaves would belong to root
find "$cache" -type f ! -name "*.so" -delete
find "$cache" -mindepth 1 -type d -exec chmod 1777 {} +
