#!/bin/sh
# Compiles nccl-tests for $ARCHS against the headers and the library of the NCCL wheel that torch
# pins, with nvcc from wheels or Debian's. Linked with DT_RPATH to that library: LD_LIBRARY_PATH
# cannot lead it to another NCCL than torch's. https://github.com/NVIDIA/nccl-tests
set -eu

context=/tmp/context
packages=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nccl=$packages/nvidia/nccl

# nvcc and its headers, or the headers alone, in a venv of the builder's own
python3 -m venv --without-pip /opt/nvcc
pip=$(echo "$context"/wheels/pip-*.whl)
/opt/nvcc/bin/python "$pip/pip" install --no-index --find-links "$context/wheels" --no-deps \
    --require-hashes --requirement "$context/nvcc.txt" --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore
wheels=$(echo /opt/nvcc/lib/python3*/site-packages/nvidia)

rpath="-Xlinker --disable-new-dtags -Xlinker -rpath -Xlinker $nccl/lib"
if [ -d "$wheels/cu13" ]; then
    cuda=$wheels/cu13
    cuda_lib=$cuda/lib
    cudart=cudart_static
    flags=$rpath
else
    # Debian's nvcc with the wheels' headers. As system headers: with -I those of glibc 2.41 clash
    # with CUDA's. The wheels have no static runtime: torch's own is linked.
    runtime=$packages/nvidia/cuda_runtime/lib
    cuda=/usr
    cuda_lib=/opt/cuda-lib
    cudart=cudart
    mkdir "$cuda_lib"
    ln -s "$runtime/libcudart.so.12" "$cuda_lib/libcudart.so"
    ar rc "$cuda_lib/libcudadevrt.a"
    flags="$rpath:$runtime -cudart shared -ccbin g++-13"
    for folder in cuda_runtime cuda_nvcc cuda_cccl; do
        flags="$flags -isystem $wheels/$folder/include"
    done
fi

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
    CUDA_HOME="$cuda" CUDA_LIB="$cuda_lib" CUDARTLIB="$cudart" NCCL_HOME=/opt/nccl-shim \
    NVCC_GENCODE="$gencode" CXXSTD=-std=c++17 NVCC_APPEND_FLAGS="$flags"

install --directory /opt/nccl-tests/bin
for binary in /opt/nccl-tests-source/build/*_perf; do
    strip --strip-unneeded "$binary"
    install "$binary" /opt/nccl-tests/bin/
done
