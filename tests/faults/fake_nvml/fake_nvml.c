/* NVML as a broken or busy machine would answer, for the real nvidia-ml-py. The file named by FAKE_NVML is read at
 * every call, so that a test can change the machine while a program looks at it. Its lines are "key value":
 *
 *     count 2             GPUs there are
 *     init 18             what nvmlInitWithFlags returns
 *     lost1 1             GPU 1 has fallen off the bus
 *     used0 1073741824    bytes held on GPU 0
 *     release0 12.5       from this second of CLOCK_MONOTONIC on, GPU 0 holds nothing
 *     pid0 4711           the process that computes on GPU 0
 *     taken0 40           per cent of GPU 0's time that this process takes
 *     mig0 1              MIG is enabled on GPU 0
 *     unsupported 1       every query that a virtual machine may not have fails
 *     flaky 2             so many memory queries fail with an unknown error
 *
 * OLD leaves out what a driver of some years ago does not have; ANCIENT leaves out its entry point too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15, UNKNOWN = 999 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;
typedef struct { unsigned int pid; unsigned long long time; unsigned int sm, memory, encoder, decoder; } ProcessUse;

static double setting(const char *key, int index) {
    char wanted[32], line[128];
    double value = 0, found;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    if (index < 0) snprintf(wanted, sizeof wanted, "%s", key);
    else snprintf(wanted, sizeof wanted, "%s%d", key, index);
    while (fgets(line, sizeof line, file)) {
        char name[32];
        if (sscanf(line, "%31s %lf", name, &found) == 2 && strcmp(name, wanted) == 0) value = found;
    }
    fclose(file);
    return value;
}

static int index_of(void *device) { return (int)(size_t)device - 1; }
static int state(void *device) { return setting("lost", index_of(device)) ? LOST : OK; }
static int optional(void *device) { return setting("unsupported", -1) ? NOT_SUPPORTED : state(device); }

#ifndef ANCIENT
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return (int)setting("init", -1); }
#endif
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int result) {
    switch (result) {
        case NOT_SUPPORTED: return "Not Supported";
        case LOST: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned int *count) { *count = (unsigned int)setting("count", -1); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return state(*device);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int index;
    if (sscanf(uuid, "GPU-fake-%d", &index) != 1) return NOT_FOUND;
    *device = (void *)(size_t)(index + 1);
    return state(*device);
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned int length) {
    snprintf(text, length, "GPU-fake-%d", index_of(device));
    return state(device);
}

int nvmlDeviceGetName(void *device, char *text, unsigned int length) {
    snprintf(text, length, "Fake GPU");
    return state(device);
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    static int failed = 0;
    struct timespec now;
    double release = setting("release", index_of(device));
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (failed < (int)setting("flaky", -1)) { failed++; return UNKNOWN; }
    memory->total = 80ULL << 30;
    memory->used = (unsigned long long)setting("used", index_of(device));
    if (release && now.tv_sec + now.tv_nsec / 1e9 >= release) memory->used = 0;
    memory->free = memory->total - memory->used;
    return state(device);
}

int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = 50;
    rates->memory = 10;
    return optional(device);
}


#ifndef OLD
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (unsigned long long)(now.tv_sec * 1000 + now.tv_nsec / 1000000) * 300;
    return optional(device);
}

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    *current = *pending = (unsigned int)setting("mig", index_of(device));
    return optional(device);
}

#endif

int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned int *count, Process *processes) {
    unsigned int pid = (unsigned int)setting("pid", index_of(device));
    int result = optional(device);
    if (result != OK) return result;
    if (!pid) { *count = 0; return OK; }
    if (!processes) { *count = 1; return INSUFFICIENT_SIZE; }
    memset(processes, 0, sizeof *processes);
    processes->pid = pid;
    processes->used = 1 << 20;
    *count = 1;
    return OK;
}

#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v2(device, count, processes);
}
#endif

int nvmlDeviceGetProcessUtilization(void *device, ProcessUse *uses, unsigned int *count, unsigned long long since) {
    struct timespec now;
    int result = optional(device);
    if (result != OK) return result;
    if (!setting("taken", index_of(device))) return NOT_FOUND;
    if (!uses) { *count = 1; return INSUFFICIENT_SIZE; }
    clock_gettime(CLOCK_REALTIME, &now);
    memset(uses, 0, sizeof *uses);
    uses->pid = (unsigned int)setting("pid", index_of(device));
    uses->time = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
    uses->sm = (unsigned int)setting("taken", index_of(device));
    *count = uses->time > since;
    return OK;
}
