// The first line of nccl-tests, printed before any GPU is touched, then its status without one.
#include <cuda_runtime.h>
#include <cstdio>
#include <nccl.h>

__global__ void nothing() {}

int main() {
  int library = 0;
  ncclGetVersion(&library);
  std::printf("# nccl-tests version stand-in nccl-headers=%d nccl-library=%d\n", NCCL_VERSION_CODE,
              library);
  int devices = 0;
  cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess) {
    std::printf("Test CUDA failure: %s\n", cudaGetErrorString(found));
    return 2;
  }
  nothing<<<1, 1>>>();
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 2;
}
