// A fake NCCL for the processes of one machine. Small messages (counts, flags, norms) are exchanged
// through shared memory. Large ones (parameters, gradients) are logged but not exchanged.
//
// Real NCCL enqueues a collective and returns. Here a small collective waits for the other ranks
// before it returns. If another rank is dead, it returns immediately and the device is stuck: every
// later wait for the device blocks and events never complete, until the communicator is aborted.
// With real NCCL the host does not notice a dead rank until it waits, either.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 64

// The start of a communicator's shared memory, followed by two slots per rank, used in turn. Two
// are enough, because a rank that has published message k+1 has read message k of all ranks.
typedef struct {
  volatile pid_t process[MAX_RANKS];
  volatile uint32_t published[MAX_RANKS];
} Header;

struct ncclComm {
  int ranks, rank;
  uint64_t key;
  uint32_t messages;
  Header *header;
};

static char *slot(ncclComm_t comm, int rank, uint32_t message) {
  size_t index = 2ul * rank + message % 2;
  return (char *)comm->header + sizeof(Header) + index * SMALL_COLLECTIVE;
}

// Zombies (state Z), for which the parent has not waited yet, are dead, too.
static int is_dead(pid_t process) {
  if (!process) return 0;
  char path[32], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (!file) return 1;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  char *name_end = strrchr(text, ')');
  return !name_end || name_end[2] == 'Z' || name_end[2] == 'X';
}

// Waits until every rank has published `message`; returns 0 if a rank died first. It sleeps instead
// of spinning, so that waits do not count as CPU time of the training.
static int wait_for_all(ncclComm_t comm, uint32_t message) {
  for (int rank = 0; rank < comm->ranks; rank++) {
    volatile uint32_t *published = &comm->header->published[rank];
    for (uint32_t seen; (seen = *published) < message;) {
      struct timespec patience = {0, 20000000};
      if (syscall(SYS_futex, published, FUTEX_WAIT, seen, &patience, NULL, 0) && errno == ETIMEDOUT &&
          is_dead(comm->header->process[rank]))
        return 0;
    }
  }
  __sync_synchronize();
  return 1;
}

// Gathers `size` bytes of every rank in `all`, in rank order; returns 0 if a rank died.
static int exchange(ncclComm_t comm, const void *mine, void *all, size_t size) {
  uint32_t message = ++comm->messages;
  memcpy(slot(comm, comm->rank, message), mine, size);
  __sync_synchronize();
  comm->header->published[comm->rank] = message;
  syscall(SYS_futex, &comm->header->published[comm->rank], FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  if (!wait_for_all(comm, message)) {
    stuck = 1;
    log_event("stuck %lx", (unsigned long)comm->key);
    return 0;
  }
  for (int rank = 0; rank < comm->ranks; rank++) memcpy((char *)all + rank * size, slot(comm, rank, message), size);
  return 1;
}

static ncclComm_t join(int ranks, int rank, uint64_t key) {
  if (ranks > MAX_RANKS) {
    fprintf(stderr, "nullgpu: at most %d ranks\n", MAX_RANKS);
    abort();
  }
  ncclComm_t comm = calloc(1, sizeof *comm);
  *comm = (struct ncclComm){ranks, rank, key};
  char name[64];
  snprintf(name, sizeof name, "/dev/shm/nullgpu.%016lx", (unsigned long)key);
  int file = open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  size_t size = sizeof(Header) + 2ul * ranks * SMALL_COLLECTIVE;
  if (file < 0 || ftruncate(file, size) < 0) abort();
  comm->header = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (comm->header == MAP_FAILED) abort();
  comm->header->process[rank] = getpid();
  char mine = 0, all[MAX_RANKS];
  exchange(comm, &mine, all, 1);  // now all ranks have mapped the file, so its name can be removed
  if (rank == 0) unlink(name);
  log_event("nccl init %lx ranks=%d rank=%d", (unsigned long)key, ranks, rank);
  return comm;
}

static size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    default: return 1;
  }
}

static double read_value(const char *data, ncclDataType_t type, size_t index) {
  switch (type) {
    case ncclInt8: return ((int8_t *)data)[index];
    case ncclInt32: return ((int32_t *)data)[index];
    case ncclUint32: return ((uint32_t *)data)[index];
    case ncclInt64: return ((int64_t *)data)[index];
    case ncclUint64: return ((uint64_t *)data)[index];
    case ncclFloat32: return ((float *)data)[index];
    case ncclFloat64: return ((double *)data)[index];
    case ncclBfloat16: {
      uint32_t bits = (uint32_t)((uint16_t *)data)[index] << 16;
      float value;
      memcpy(&value, &bits, 4);
      return value;
    }
    case ncclFloat16: return 0;  // only kernels write float16, and they do nothing here
    default: return ((uint8_t *)data)[index];
  }
}

static void write_value(char *data, ncclDataType_t type, size_t index, double value) {
  switch (type) {
    case ncclInt8: ((int8_t *)data)[index] = value; break;
    case ncclInt32: ((int32_t *)data)[index] = value; break;
    case ncclUint32: ((uint32_t *)data)[index] = value; break;
    case ncclInt64: ((int64_t *)data)[index] = value; break;
    case ncclUint64: ((uint64_t *)data)[index] = value; break;
    case ncclFloat32: ((float *)data)[index] = value; break;
    case ncclFloat64: ((double *)data)[index] = value; break;
    case ncclBfloat16: {
      float narrow = value;
      uint32_t bits;
      memcpy(&bits, &narrow, 4);
      ((uint16_t *)data)[index] = bits >> 16;
      break;
    }
    case ncclFloat16: ((uint16_t *)data)[index] = 0; break;
    default: ((uint8_t *)data)[index] = value;
  }
}

static double combine(ncclRedOp_t operation, double left, double right) {
  switch (operation) {
    case ncclMax: return left > right ? left : right;
    case ncclMin: return left < right ? left : right;
    case ncclProd: return left * right;
    default: return left + right;
  }
}

static void reduce(ncclComm_t comm, const char *all, char *to, size_t start, size_t count, size_t stride,
                   ncclDataType_t type, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    double value = read_value(all, type, start + i);
    for (int rank = 1; rank < comm->ranks; rank++)
      value = combine(operation, value, read_value(all + rank * stride * width(type), type, start + i));
    write_value(to, type, i, operation == ncclAvg ? value / comm->ranks : value);
  }
}

// Logs a collective; returns 0 if it is not carried out, because it is large or never completes.
static int has_values(const char *name, ncclComm_t comm, size_t bytes) {
  log_event("nccl %s %lx ranks=%d bytes=%zu", name, (unsigned long)comm->key, comm->ranks, bytes);
  if (block_next_collective) {
    block_next_collective = 0;
    stuck = 1;
    log_event("stuck %lx", (unsigned long)comm->key);
  }
  return !stuck && bytes <= SMALL_COLLECTIVE;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, struct CUstream_st *stream) {
  size_t size = count * width(type);
  if (!has_values("all_reduce", comm, size)) return ncclSuccess;
  char *all = malloc(size * comm->ranks);
  if (exchange(comm, send, all, size)) reduce(comm, all, receive, 0, count, count, type, operation);
  free(all);
  return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t comm, struct CUstream_st *stream) {
  size_t size = count * comm->ranks * width(type);
  if (!has_values("reduce_scatter", comm, size)) return ncclSuccess;
  char *all = malloc(size * comm->ranks);
  if (exchange(comm, send, all, size))
    reduce(comm, all, receive, comm->rank * count, count, count * comm->ranks, type, operation);
  free(all);
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           struct CUstream_st *stream) {
  size_t size = count * width(type);
  if (!has_values("all_gather", comm, size * comm->ranks)) return ncclSuccess;
  exchange(comm, send, receive, size);
  return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           struct CUstream_st *stream) {
  size_t size = count * width(type);
  if (!has_values("broadcast", comm, size)) return ncclSuccess;
  char *all = malloc(size * comm->ranks);
  if (exchange(comm, comm->rank == root ? send : receive, all, size)) memcpy(receive, all + root * size, size);
  free(all);
  return ncclSuccess;
}

ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          struct CUstream_st *stream) {
  size_t part = count * width(type), size = part * comm->ranks;
  if (!has_values("all_to_all", comm, size)) return ncclSuccess;
  char *all = malloc(size * comm->ranks);
  if (exchange(comm, send, all, size))
    for (int rank = 0; rank < comm->ranks; rank++)
      memcpy((char *)receive + rank * part, all + rank * size + comm->rank * part, part);
  free(all);
  return ncclSuccess;
}

// Parts of an all-to-all with uneven parts, or of any before NCCL 2.28: only logged.
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      struct CUstream_st *stream) {
  has_values("send", comm, count * width(type));
  return ncclSuccess;
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      struct CUstream_st *stream) {
  return ncclSuccess;
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       struct CUstream_st *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  int file = open("/dev/urandom", O_RDONLY);
  if (read(file, id->internal, 8) != 8) abort();
  close(file);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  uint64_t key;
  memcpy(&key, id.internal, 8);
  *comm = join(ranks, rank, key);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return ncclCommInitRankConfig(comm, ranks, *ids, rank, config);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm, ncclConfig_t *config) {
  int mine[2] = {color, key}, all[2 * MAX_RANKS], ranks = 0, rank = 0;
  if (!exchange(parent, mine, all, sizeof mine)) return ncclInternalError;
  for (int other = 0; other < parent->ranks; other++) {
    if (all[2 * other] != color) continue;
    ranks++;
    rank += all[2 * other + 1] < key || (all[2 * other + 1] == key && other < parent->rank);
  }
  *comm = color < 0 ? NULL : join(ranks, rank, parent->key * 1000003 + 7919 * (color + 1) + parent->messages);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  log_event("nccl abort %lx", (unsigned long)comm->key);
  stuck = 0;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  *count = comm->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) { return "error of a stand-in for NCCL"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }

ncclResult_t ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclSystemError : ncclSuccess; }
