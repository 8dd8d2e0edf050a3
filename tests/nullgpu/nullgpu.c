// Fake CUDA devices. This library is preloaded instead of the CUDA runtime and driver, so that
// PyTorch's own CUDA code runs on any machine: the caching allocator, streams, pinned memory,
// autograd threads, FSDP, ProcessGroupNCCL. Kernels do nothing. Device memory is reserved address
// space that only small copies write to. Streams and events complete immediately.
//
// NULLGPU_COUNT       number of devices (8)
// NULLGPU_GIB         memory per device in GiB (79.6)
// NULLGPU_CAPABILITY  compute capability, major * 10 + minor (80)
// NULLGPU_NAME        name of the devices
// NULLGPU_LOG         folder for the log of each process
// NULLGPU_STACKS      file to which the Python stack of each wait is appended
//
// The tests call the exported functions nullgpu_* at the end through ctypes.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 64
#define EXPORT __attribute__((visibility("default")))

volatile int stuck, block_next_collective;

// ---------------------------------------------------------------- environment and log

int environment_integer(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

static int all_devices(void) { return environment_integer("NULLGPU_COUNT", 8); }

static int device_count(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return all_devices();
  int count = 0;
  for (char *end; *visible && count < all_devices(); count++, visible = *end ? end + 1 : end) {
    long device = strtol(visible, &end, 10);
    if (end == visible || device < 0 || device >= all_devices()) break;
  }
  return count;
}

static int capability(void) { return environment_integer("NULLGPU_CAPABILITY", 80); }

static size_t device_bytes(void) {
  const char *value = getenv("NULLGPU_GIB");
  return (size_t)((value ? atof(value) : 79.6) * (1 << 30));
}

void *new_handle(void) {
  static uintptr_t next = 0x1000;
  return (void *)__sync_fetch_and_add(&next, 0x10);
}

void log_event(const char *format, ...) {
  static int file = -1;
  static pid_t owner;
  const char *folder = getenv("NULLGPU_LOG"), *rank = getenv("RANK");
  if (!folder) return;
  if (owner != getpid()) {  // the first event, or the first one after a fork
    char path[4096];
    snprintf(path, sizeof path, "%s/rank_%s.%d", folder, rank ? rank : "none", getpid());
    file = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    owner = getpid();
  }
  char line[1024], thread[17] = "?";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  for (char *c = thread; *c; c++)
    if (*c == ' ') *c = '_';
  int length = snprintf(line, sizeof line, "%ld %s ", (long)syscall(SYS_gettid), thread);
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
  va_end(arguments);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  if (write(file, line, length) < 0) return;
}

// ---------------------------------------------------------------- memory

typedef struct {
  char *start;
  size_t size;
  int device;  // HOST: pinned host memory
} Block;

enum { HOST = -1, UNKNOWN = -2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t block_count, block_room;
static size_t used[MAX_DEVICES], pinned, pinned_peak;
static int context[MAX_DEVICES];
static long failing_allocations;
static volatile int lost;
static long launches;
static __thread int current;

int current_device(void) { return current; }

static void touch_context(int device) {
  if (!__sync_lock_test_and_set(&context[device], 1)) log_event("context %d", device);
}

static void add_block(void *start, size_t size, int device) {
  pthread_mutex_lock(&lock);
  if (block_count == block_room) {
    block_room = block_room ? 2 * block_room : 1024;
    blocks = realloc(blocks, block_room * sizeof *blocks);
  }
  blocks[block_count++] = (Block){start, size, device};
  if (device == HOST) {
    pinned += size;
    if (pinned > pinned_peak) pinned_peak = pinned;
  }
  pthread_mutex_unlock(&lock);
}

static Block remove_block(const void *start) {
  Block found = {0, 0, UNKNOWN};
  pthread_mutex_lock(&lock);
  for (size_t i = block_count; i-- > 0;)
    if (blocks[i].start == start) {
      found = blocks[i];
      blocks[i] = blocks[--block_count];
      if (found.device == HOST) pinned -= found.size;
      break;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

static Block block_of(const void *pointer) {
  Block found = {0, 0, UNKNOWN};
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count; i++)
    if ((char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) {
      found = blocks[i];
      break;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

static void *address_space(size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *start = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
  return start == MAP_FAILED ? NULL : start;
}

// Reserves `size` bytes of the device; returns 1 on success.
static int take(int device, size_t size) {
  if (__sync_fetch_and_add(&failing_allocations, 0) > 0) {
    __sync_fetch_and_sub(&failing_allocations, 1);
    log_event("refuse %d %zu", device, size);
    return 0;
  }
  pthread_mutex_lock(&lock);
  int fits = used[device] + size <= device_bytes();
  if (fits) used[device] += size;
  pthread_mutex_unlock(&lock);
  log_event(fits ? "allocate %d %zu" : "refuse %d %zu", device, size);
  if (fits) touch_context(device);
  return fits;
}

static void give_back(int device, size_t size) {
  __sync_fetch_and_sub(&used[device], size);
  log_event("free %d %zu", device, size);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
  if (lost) return cudaErrorDevicesUnavailable;
  if (!take(current, size)) return cudaErrorMemoryAllocation;
  *pointer = address_space(size);
  add_block(*pointer, size, current);
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  if (!pointer) return cudaSuccess;
  Block block = remove_block(pointer);
  if (block.device >= 0) give_back(block.device, block.size);
  if (block.device == HOST) log_event("unpin %zu", block.size);
  if (block.start) munmap(block.start, block.size ? block.size : 1);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
  return cudaMalloc(pointer, size);
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  *pointer = address_space(size);
  if (!*pointer) return cudaErrorMemoryAllocation;
  touch_context(current);
  log_event("pin %zu", size);
  add_block(*pointer, size, HOST);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  touch_context(current);
  log_event("pin %zu", size);
  add_block(pointer, size, HOST);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
  touch_context(current);
  Block block = remove_block(pointer);
  log_event("unpin %zu", block.size);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = device_bytes();
  *free_bytes = *total - used[current];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  Block block = block_of(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->device = block.device >= 0 ? block.device : current;
  attributes->type = block.device >= 0      ? cudaMemoryTypeDevice
                     : block.device == HOST ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  attributes->devicePointer = attributes->hostPointer = (void *)pointer;
  return cudaSuccess;
}

// Expandable segments reserve addresses, create physical memory and map it to the addresses. The
// driver's handles of physical memory are opaque; here a handle is a pointer to this struct.
typedef struct {
  size_t size;
  int device;
} Physical;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *property,
                                       CUmemAllocationGranularity_flags option) {
  *granularity = 2 << 20;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
  void *start = address_space(size);
  if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
  add_block(start, size, current);
  *pointer = (CUdeviceptr)start;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  remove_block((void *)pointer);
  munmap((void *)pointer, size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property,
                     unsigned long long flags) {
  int device = property->location.id;
  if (lost) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *physical = malloc(sizeof *physical);
  *physical = (Physical){size, device};
  *handle = (CUmemGenericAllocationHandle)physical;
  return CUDA_SUCCESS;
}

// Memory mapped here later contains zeros, as in a new process.
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  madvise((void *)pointer, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical *physical = (Physical *)handle;
  give_back(physical->device, physical->size);
  free(physical);
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- copies

// Set if this thread's last call was a copy that waited. PyTorch synchronizes the stream after it,
// which does not wait again and is not counted.
static __thread int has_waited;

// Carries out small copies, such as those of counts and flags, and all copies between host memory.
static void move(void *to, const void *from, size_t size) {
  if (size <= SMALL_COPY || (block_of(to).device < 0 && block_of(from).device < 0)) memmove(to, from, size);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  if (lost) return cudaErrorDevicesUnavailable;
  waited("copy");
  move(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (lost) return cudaErrorDevicesUnavailable;
  // A copy from the device to pageable memory is synchronous.
  if (block_of(to).device == UNKNOWN && block_of(from).device >= 0) {
    waited("copy");
    has_waited = 1;
  }
  // The driver stages copies from pageable memory, and may wait for earlier ones.
  if (block_of(to).device >= 0 && block_of(from).device == UNKNOWN) log_event("pageable %zu", size);
  move(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
  move(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
  if (size <= SMALL_COPY) memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  return cudaMemset(to, value, size);
}

// ---------------------------------------------------------------- streams, events and waits

typedef struct {
  int after_stuck;  // recorded after a collective that never completes
  struct timespec recorded;
} Event;

static long waits;

// Appends this thread's Python stack to NULLGPU_STACKS, with the interpreter's internal function.
static void dump_stack(void) {
  const char *path = getenv("NULLGPU_STACKS");
  void *(*thread_state)(void) = path ? dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState") : NULL;
  void (*dump)(int, void *) = path ? dlsym(RTLD_DEFAULT, "_Py_DumpTraceback") : NULL;
  if (!thread_state || !dump || !thread_state()) return;
  int file = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  dprintf(file, "process %d ", getpid());
  dump(file, thread_state());
  close(file);
}

void waited(const char *for_what) {
  __sync_fetch_and_add(&waits, 1);
  log_event("wait %s", for_what);
  dump_stack();
}

static cudaError_t wait_until_done(const char *for_what, int blocked) {
  if (!has_waited) waited(for_what);
  has_waited = 0;
  while (blocked && stuck && !lost) usleep(10000);
  return lost ? cudaErrorDevicesUnavailable : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_until_done("stream", 1); }
cudaError_t cudaDeviceSynchronize(void) { return wait_until_done("device", 1); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_until_done("event", ((Event *)event)->after_stuck); }

cudaError_t cudaStreamQuery(cudaStream_t stream) { return stuck ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return stuck && ((Event *)event)->after_stuck ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ((Event *)event)->after_stuck = stuck;
  clock_gettime(CLOCK_MONOTONIC, &((Event *)event)->recorded);
  return lost ? cudaErrorDevicesUnavailable : cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  struct timespec *from = &((Event *)start)->recorded, *to = &((Event *)end)->recorded;
  *milliseconds = (to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) / 1e6;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = new_handle();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *node_count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// ---------------------------------------------------------------- kernels

static cudaError_t launch(void) {
  __sync_fetch_and_add(&launches, 1);
  return lost ? cudaErrorDevicesUnavailable : cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
  return launch();
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  return launch() ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
  return launch() ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  *pointer = (void *)symbol;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = capability();
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = new_handle();
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = new_handle();
  return CUDA_SUCCESS;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
  *blocks_ = 4;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks_, const void *function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks_, function, threads, shared, 0);
}

// ---------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int *count) {
  *count = device_count();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}

// Since CUDA 12 this call creates the device's context.
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current = device;
  touch_context(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  const char *name = getenv("NULLGPU_NAME");
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", name ? name : "NVIDIA A100-SXM4-80GB");
  properties->totalGlobalMem = device_bytes();
  properties->major = capability() / 10;
  properties->minor = capability() % 10;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->sharedMemPerBlockOptin = 232448;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = properties->concurrentKernels = properties->canMapHostMemory = 1;
  properties->asyncEngineCount = 3;
  properties->memoryBusWidth = 5120;
  properties->pciBusID = device + 1;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *possible, int device, int peer) {
  *possible = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation     ? "out of memory"
         : error == cudaErrorDevicesUnavailable ? "CUDA-capable device(s) is/are busy or unavailable"
                                                : "error of a stand-in device";
}
const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = context[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *found) {
  *found = (CUcontext)0x77;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "error of a stand-in driver";
  return CUDA_SUCCESS;
}

// NVRTC, which compiles some of PyTorch's kernels, looks for a table of the driver and needs none.
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}

// PyTorch looks up driver functions by name.
static CUresult succeed(void) { return CUDA_SUCCESS; }

static const struct {
  const char *name;
  void *function;
} driver[] = {
    {"cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState},
    {"cuCtxGetCurrent", cuCtxGetCurrent},
    {"cuDeviceGet", cuDeviceGet},
    {"cuDeviceGetAttribute", cuDeviceGetAttribute},
    {"cuGetErrorString", cuGetErrorString},
    {"cuMemGetAllocationGranularity", cuMemGetAllocationGranularity},
    {"cuMemAddressReserve", cuMemAddressReserve},
    {"cuMemAddressFree", cuMemAddressFree},
    {"cuMemCreate", cuMemCreate},
    {"cuMemUnmap", cuMemUnmap},
    {"cuMemRelease", cuMemRelease},
    {"cuFuncGetAttribute", cuFuncGetAttribute},
    {"cuModuleLoadData", cuModuleLoadData},
    {"cuModuleGetFunction", cuModuleGetFunction},
    {"cuLaunchKernel", cuLaunchKernel},
    {"cuLaunchKernelEx", cuLaunchKernelEx},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = succeed;
  for (size_t i = 0; i < sizeof driver / sizeof *driver; i++)
    if (!strcmp(symbol, driver[i].name)) *function = driver[i].function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// PyTorch counts devices with NVML, and queries whether they can share memory over a fabric.
typedef int nvmlReturn_t;

nvmlReturn_t nvmlInit_v2(void) { return 0; }
nvmlReturn_t nvmlInit(void) { return 0; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  *count = all_devices();
  return 0;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = new_handle();
  return 0;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}

// ---------------------------------------------------------------- for the tests

// Logs the text with the number of launched kernels and the pinned bytes.
EXPORT void nullgpu_mark(const char *text) {
  log_event("mark %s launches=%ld pinned=%zu pinned_peak=%zu", text, launches, pinned, pinned_peak);
}
// The next `count` allocations of device memory fail.
EXPORT void nullgpu_fail_allocations(long count) { __sync_fetch_and_add(&failing_allocations, count); }
// The next collective of this process never completes, as if a peer had died.
EXPORT void nullgpu_block_next_collective(void) { block_next_collective = 1; }
// All later calls fail.
EXPORT void nullgpu_lose_device(void) { lost = 1; }
// Number of calls in which a thread waited for the device.
EXPORT long nullgpu_waits(void) { return waits; }
EXPORT long nullgpu_launches(void) { return launches; }
EXPORT long nullgpu_pinned_peak(void) { return (long)pinned_peak; }
