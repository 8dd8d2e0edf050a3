// Declarations shared by the source files of the fake CUDA libraries; see nullgpu.c.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Copies and collectives of at most this many bytes are carried out: counts, bounds, flags. Larger
// ones are skipped, so that no physical memory is needed for device memory.
#define SMALL_COPY 65536  // DDP compares the shapes of all parameters in one copy
#define SMALL_COLLECTIVE (1u << 20)

int environment_integer(const char *name, int otherwise);
void *new_handle(void);

// Appends "<thread id> <thread name> <text>" to $NULLGPU_LOG/rank_<RANK>.<pid>, if NULLGPU_LOG is set.
void log_event(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Counts and logs a call for which the calling thread waits for the device.
void waited(const char *for_what);

// The device of the calling thread.
int current_device(void);
// `stuck` is set by a collective that never completes. Every later wait for the device then blocks.
extern volatile int stuck;
extern volatile int block_next_collective;
