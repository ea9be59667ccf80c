/* A driver and a runtime with one GPU that has memory and computes nothing: `make prove-cuda` loads it before torch.
   Streams and events are always done, copies are copies of the host's, kernels are never launched. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define DONE(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define GIVES(name, type, value, ...) cudaError_t name(type *out, ##__VA_ARGS__) { *out = value; return cudaSuccess; }

GIVES(cudaGetDeviceCount, int, 1)
GIVES(cudaGetDevice, int, 0)
GIVES(cudaDriverGetVersion, int, CUDART_VERSION)
GIVES(cudaDeviceGetAttribute, int, 0, enum cudaDeviceAttr attribute, int device)
GIVES(cudaDeviceCanAccessPeer, int, 0, int device, int peer)
GIVES(cudaEventCreateWithFlags, cudaEvent_t, malloc(8), unsigned flags)
GIVES(cudaStreamCreateWithPriority, cudaStream_t, malloc(8), unsigned flags, int priority)
GIVES(cudaHostAlloc, void *, malloc(size), size_t size, unsigned flags)
GIVES(cudaMalloc, void *, calloc(1, size), size_t size)
GIVES(cudaEventElapsedTime, float, 1, cudaEvent_t from, cudaEvent_t to)
DONE(cudaSetDevice, int device)
DONE(cudaDeviceSynchronize, void)
DONE(cudaGetLastError, void)
DONE(cudaPeekAtLastError, void)
DONE(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
DONE(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
DONE(cudaEventSynchronize, cudaEvent_t event)
DONE(cudaEventQuery, cudaEvent_t event)
DONE(cudaEventDestroy, cudaEvent_t event)
DONE(cudaStreamSynchronize, cudaStream_t stream)
DONE(cudaStreamQuery, cudaStream_t stream)
DONE(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
DONE(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaFreeHost(void *memory) { free(memory); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = 140ULL << 30; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
  memset(found, 0, sizeof *found); return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memcpy(to, from, size); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  memcpy(to, from, size); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "stub");
  found->uuid.bytes[0] = 1;
  found->major = 9;
  found->totalGlobalMem = 140ULL << 30;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 227 << 10;
  return cudaSuccess; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **words) { *words = "stub"; return CUDA_SUCCESS; }
