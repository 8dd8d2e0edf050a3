// Shared by the parts of the stand-in for the CUDA libraries. See nullgpu.c for what it is.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Copies and collectives of at most this many bytes carry values: counts, bounds, flags. Larger
// ones are skipped, so that device memory stays untouched address space.
#define SMALL_COPY 65536  // DDP compares the shapes of all parameters in one copy
#define SMALL_COLLECTIVE (1u << 20)

int environment_integer(const char *name, int otherwise);
void *new_handle(void);

// Appends "<thread id> <thread name> <text>" to $NULLGPU_LOG/rank_<RANK>.<pid>, if NULLGPU_LOG is set.
void log_event(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Counts and logs a call that makes the calling thread wait for the device.
void waited(const char *for_what);

// The device of the calling thread; a collective that never completes blocks every later wait.
int current_device(void);
extern volatile int stuck;
extern volatile int block_next_collective;
