#!/bin/sh
# Compiles nccl-tests for $ARCHS against the headers and the library of the NCCL wheel that torch
# pins, with nvcc from wheels. Linked with DT_RPATH to that library: LD_LIBRARY_PATH cannot lead it
# to another NCCL than torch's. https://github.com/NVIDIA/nccl-tests
set -eu

context=/tmp/context
packages=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nccl=$packages/nvidia/nccl

# nvcc and its headers beside the runtime's, in a venv of the builder's own
python3 -m venv --without-pip /opt/nvcc
pip=$(echo "$context"/wheels/pip-*.whl)
/opt/nvcc/bin/python "$pip/pip" install --no-index --find-links "$context/wheels" --no-deps \
    --require-hashes --requirement "$context/nvcc.txt" --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore
cuda=$(echo /opt/nvcc/lib/python3*/site-packages/nvidia/cu13)

# the linker wants a libnccl.so, the wheel has libnccl.so.2 alone
mkdir -p /opt/nccl-shim/lib
ln -s "$nccl/include" /opt/nccl-shim/include
ln -s "$nccl/lib/libnccl.so.2" /opt/nccl-shim/lib/libnccl.so

gencode=
for arch in $ARCHS; do
    gencode="$gencode -gencode=arch=compute_$arch,code=sm_$arch"
done

cp -r "$context/source" /opt/nccl-tests-source
make -C /opt/nccl-tests-source -j "$(nproc)" \
    CUDA_HOME="$cuda" CUDA_LIB="$cuda/lib" CUDARTLIB=cudart_static NCCL_HOME=/opt/nccl-shim \
    NVCC_GENCODE="$gencode" CXXSTD=-std=c++17 \
    NVCC_APPEND_FLAGS="-Xlinker --disable-new-dtags -Xlinker -rpath -Xlinker $nccl/lib"

install --directory /opt/nccl-tests/bin
for binary in /opt/nccl-tests-source/build/*_perf; do
    strip --strip-unneeded "$binary"
    install "$binary" /opt/nccl-tests/bin/
done
