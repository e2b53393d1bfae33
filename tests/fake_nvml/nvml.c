/* A fake libnvidia-ml.so.1 for tests. It reads the text file named by FAKE_NVML on every call, so that a test can
 * change the hardware while the program runs. A line is "key value"; a key may end in "@<gpu>" ("@0", for a MIG slice
 * "@0.1"), which wins over the key without it:
 *
 *   gpus 2                             number of GPUs
 *   migs@0 2                           number of MIG slices of GPU 0
 *   name@0 / uuid@0 / bus@0            identity
 *   ret.<function>[@gpu] 3             return code instead of an answer
 *   driver_gone 9                      return code of every function, as without a kernel driver
 *   load 2                             how often the driver was loaded: what was initialised before does not answer (1)
 *   delay.<function>[@gpu] 3000        milliseconds before answering, or "forever"
 *   val.<function>[@gpu] 1 2 3         values, in the order of the answer's fields
 *
 * Functions are left out with -DWITHOUT_<function>, to imitate an old driver. With FAKE_NVML_CALLS set, every call is
 * appended to that file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static unsigned initialised_at;
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_GPUS = 16, MAX_SLICES = 8 };

typedef unsigned long long u64;
typedef struct { int gpu, slice; } Device;
static Device gpu_devices[MAX_GPUS];
static Device slice_devices[MAX_GPUS][MAX_SLICES];

static Device *gpu_at(unsigned i) {
    gpu_devices[i] = (Device){(int)i, -1};
    return &gpu_devices[i];
}

static Device *slice_at(unsigned i, unsigned j) {
    slice_devices[i][j] = (Device){(int)i, (int)j};
    return &slice_devices[i][j];
}

/* The value of an exact key, into out. 1 if it is there. */
static int exact(const char *text, const char *key, char *out, size_t size) {
    size_t length = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, length) != 0 || line[length] != ' ') continue;
        const char *value = line + length + 1, *end = strchr(value, '\n');
        size_t n = end ? (size_t)(end - value) : strlen(value);
        if (n >= size) n = size - 1;
        memcpy(out, value, n);
        out[n] = 0;
        return 1;
    }
    return 0;
}

static int look(const char *prefix, const char *name, const Device *device, char *out, size_t size) {
    char text[65536] = {0}, key[256];
    const char *path = getenv("FAKE_NVML");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t n, total = 0;
    while ((n = read(fd, text + total, sizeof text - 1 - (size_t)total)) > 0) total += n;
    close(fd);
    if (device && device->slice >= 0) {
        snprintf(key, sizeof key, "%s%s@%d.%d", prefix, name, device->gpu, device->slice);
        if (exact(text, key, out, size)) return 1;
    }
    if (device && device->slice < 0) {
        snprintf(key, sizeof key, "%s%s@%d", prefix, name, device->gpu);
        if (exact(text, key, out, size)) return 1;
    }
    snprintf(key, sizeof key, "%s%s", prefix, name);
    return exact(text, key, out, size);
}

static unsigned number(const char *name, const Device *device, unsigned otherwise) {
    char value[64];
    return look("", name, device, value, sizeof value) ? (unsigned)strtoul(value, NULL, 0) : otherwise;
}

/* Logs, waits, and gives the return code that the file wants for this function. */
static int enter(const char *function, const Device *device) {
    char value[64];
    const char *calls = getenv("FAKE_NVML_CALLS");
    if (calls) {
        int fd = open(calls, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        char line[160];
        int n = snprintf(line, sizeof line, "%s\n", function);
        if (fd >= 0) {
            if (write(fd, line, (size_t)n) != n) abort();
            close(fd);
        }
    }
    if (look("delay.", function, device, value, sizeof value)) {
        if (strcmp(value, "forever") == 0)
            for (;;) pause();
        long ms = strtol(value, NULL, 10);
        struct timespec left = {ms / 1000, (ms % 1000) * 1000000L};
        while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
    }
    if (look("", "driver_gone", NULL, value, sizeof value)) return (int)strtol(value, NULL, 10);
    if (look("ret.", function, device, value, sizeof value)) return (int)strtol(value, NULL, 10);
    unsigned load = number("load", NULL, 0);
    if (strncmp(function, "nvmlInit", 8) == 0) initialised_at = load;
    return initialised_at == load ? SUCCESS : UNINITIALIZED;
}

/* Up to n numbers of val.<function>; how many there were. */
static int values(const char *function, const Device *device, u64 *out, int n) {
    char text[4096];
    if (!look("val.", function, device, text, sizeof text)) return 0;
    int count = 0;
    for (char *save, *word = strtok_r(text, " ", &save); word && count < n; word = strtok_r(NULL, " ", &save))
        out[count++] = strtoull(word, NULL, 0);
    return count;
}

static int one_unsigned(const char *function, const Device *device, unsigned *out) {
    u64 value;
    int code = enter(function, device);
    if (code) return code;
    if (values(function, device, &value, 1) < 1) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return SUCCESS;
}

static int one_u64(const char *function, const Device *device, u64 *out) {
    int code = enter(function, device);
    if (code) return code;
    return values(function, device, out, 1) < 1 ? NOT_SUPPORTED : SUCCESS;
}

static int text_of(const char *function, const char *key, const Device *device, char *out, unsigned size) {
    int code = enter(function, device);
    if (code) return code;
    return look("", key, device, out, size) ? SUCCESS : NOT_SUPPORTED;
}

#ifndef WITHOUT_nvmlInitWithFlags
int nvmlInitWithFlags(unsigned flags) { (void)flags; return enter("nvmlInitWithFlags", NULL); }
#endif
int nvmlShutdown(void) { return enter("nvmlShutdown", NULL); }
const char *nvmlErrorString(int code) { (void)code; return "fake"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return text_of("nvmlSystemGetDriverVersion", "driver", NULL, out, size);
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    int code = enter("nvmlDeviceGetCount_v2", NULL);
    *out = number("gpus", NULL, 0);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (index >= MAX_GPUS || index >= number("gpus", NULL, 0)) return INVALID_ARGUMENT;
    *out = gpu_at(index);
    return enter("nvmlDeviceGetHandleByIndex_v2", *out);
}

int nvmlDeviceGetName(Device *d, char *out, unsigned size) { return text_of("nvmlDeviceGetName", "name", d, out, size); }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned size) { return text_of("nvmlDeviceGetUUID", "uuid", d, out, size); }

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) {
    memset(out, 0, sizeof *out);
    return text_of("nvmlDeviceGetPciInfo_v3", "bus", d, out->bus_id, sizeof out->bus_id);
}

#ifndef WITHOUT_nvmlDeviceGetMigMode
int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    int code = enter("nvmlDeviceGetMigMode", d);
    *current = *pending = number("migs", d, 0) > 0;
    return code;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *out) {
    int code = enter("nvmlDeviceGetMaxMigDeviceCount", d);
    *out = MAX_SLICES;
    return code;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    int code = enter("nvmlDeviceGetMigDeviceHandleByIndex", d);
    if (code) return code;
    if (index >= MAX_SLICES || index >= number("migs", d, 0)) return NOT_FOUND;
    *out = slice_at((unsigned)d->gpu, index);
    return SUCCESS;
}
#endif

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device *d, Utilization *out) {
    u64 v[2];
    int code = enter("nvmlDeviceGetUtilizationRates", d);
    if (code) return code;
    if (values("nvmlDeviceGetUtilizationRates", d, v, 2) < 2) return NOT_SUPPORTED;
    *out = (Utilization){(unsigned)v[0], (unsigned)v[1]};
    return SUCCESS;
}

/* val: total free used */
typedef struct { u64 total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    u64 v[3];
    int code = enter("nvmlDeviceGetMemoryInfo", d);
    if (code) return code;
    if (values("nvmlDeviceGetMemoryInfo", d, v, 3) < 3) return NOT_SUPPORTED;
    *out = (Memory){v[0], v[1], v[2]};
    return SUCCESS;
}

#ifndef WITHOUT_nvmlDeviceGetMemoryInfo_v2
/* val: total reserved free used */
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(Device *d, Memory2 *out) {
    u64 v[4];
    int code = enter("nvmlDeviceGetMemoryInfo_v2", d);
    if (code) return code;
    if (values("nvmlDeviceGetMemoryInfo_v2", d, v, 4) < 4) return NOT_SUPPORTED;
    out->total = v[0];
    out->reserved = v[1];
    out->free = v[2];
    out->used = v[3];
    return SUCCESS;
}
#endif

int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) { return one_unsigned("nvmlDeviceGetPowerUsage", d, out); }
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *out) {
    return one_unsigned("nvmlDeviceGetEnforcedPowerLimit", d, out);
}
int nvmlDeviceGetTotalEnergyConsumption(Device *d, u64 *out) {
    return one_u64("nvmlDeviceGetTotalEnergyConsumption", d, out);
}

#ifndef WITHOUT_nvmlDeviceGetTemperatureV
typedef struct { unsigned version; int sensor; int celsius; } Temperature;
int nvmlDeviceGetTemperatureV(Device *d, Temperature *out) {
    unsigned value = 0;
    int code = one_unsigned("nvmlDeviceGetTemperatureV", d, &value);
    out->celsius = (int)value;
    return code;
}
#endif
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) {
    (void)sensor;
    return one_unsigned("nvmlDeviceGetTemperature", d, out);
}

/* val: SM clock, memory clock. NVML's types: 0 graphics, 1 SM, 2 memory. */
int nvmlDeviceGetClockInfo(Device *d, int type, unsigned *out) {
    u64 v[2];
    int code = enter("nvmlDeviceGetClockInfo", d);
    if (code) return code;
    if (values("nvmlDeviceGetClockInfo", d, v, 2) < 2) return NOT_SUPPORTED;
    *out = (unsigned)(type == 2 ? v[1] : v[0]);
    return SUCCESS;
}

/* val: milliwatts of field 185 (average) and 186 (instant); a third and fourth value are their own return codes. */
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, ret;
    union { double d; unsigned u; u64 ull; } value;
} FieldValue;
#ifndef WITHOUT_nvmlDeviceGetFieldValues
int nvmlDeviceGetFieldValues(Device *d, int count, FieldValue *out) {
    u64 v[4] = {0};
    int code = enter("nvmlDeviceGetFieldValues", d);
    if (code) return code;
    int n = values("nvmlDeviceGetFieldValues", d, v, 4);
    for (int i = 0; i < count; i++) {
        int place = out[i].field == 186 ? 1 : 0;
        out[i].ret = n <= place ? NOT_SUPPORTED : (int)v[2 + place];
        out[i].value.u = (unsigned)v[place];
    }
    return SUCCESS;
}
#endif

/* val: KB/s sent, received. NVML's counters: 0 tx, 1 rx. */
int nvmlDeviceGetPcieThroughput(Device *d, int counter, unsigned *out) {
    u64 v[2];
    int code = enter("nvmlDeviceGetPcieThroughput", d);
    if (code) return code;
    if (values("nvmlDeviceGetPcieThroughput", d, v, 2) < 2) return NOT_SUPPORTED;
    *out = (unsigned)v[counter ? 1 : 0];
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int counter, u64 *out) {
    (void)kind, (void)counter;
    return one_u64("nvmlDeviceGetTotalEccErrors", d, out);
}

/* GPM. val.nvmlGpmMetricsGet: id value id value ...; a metric that is not listed is not supported. */
#ifndef WITHOUT_nvmlGpmQueryDeviceSupport
typedef struct { Device *device; } Sample;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned id; int ret; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *one, *two; Metric metrics[]; } MetricsGet;
int nvmlGpmQueryDeviceSupport(Device *d, GpmSupport *out) {
    int code = enter("nvmlGpmQueryDeviceSupport", d);
    out->supported = number("gpm", d, 1);
    return code;
}
int nvmlGpmSampleAlloc(Sample **out) {
    int code = enter("nvmlGpmSampleAlloc", NULL);
    if (!code) *out = calloc(1, sizeof **out);
    return code;
}
int nvmlGpmSampleFree(Sample *sample) {
    free(sample);
    return enter("nvmlGpmSampleFree", NULL);
}
int nvmlGpmSampleGet(Device *d, Sample *sample) {
    sample->device = d;
    return enter("nvmlGpmSampleGet", d);
}
int nvmlGpmMetricsGet(MetricsGet *get) {
    u64 v[64];
    int code = enter("nvmlGpmMetricsGet", get->two->device);
    if (code) return code;
    if (get->one->device != get->two->device) return INVALID_ARGUMENT;
    int n = values("nvmlGpmMetricsGet", get->two->device, v, 64);
    for (unsigned i = 0; i < get->count; i++) {
        get->metrics[i].ret = NOT_SUPPORTED;
        for (int j = 0; j + 1 < n; j += 2)
            if (v[j] == get->metrics[i].id) {
                get->metrics[i].ret = SUCCESS;
                get->metrics[i].value = (double)v[j + 1];
            }
    }
    return SUCCESS;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetCurrentClocksEventReasons
int nvmlDeviceGetCurrentClocksEventReasons(Device *d, u64 *out) {
    return one_u64("nvmlDeviceGetCurrentClocksEventReasons", d, out);
}
#endif
#ifndef WITHOUT_nvmlDeviceGetCurrentClocksThrottleReasons
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, u64 *out) {
    return one_u64("nvmlDeviceGetCurrentClocksThrottleReasons", d, out);
}
#endif

/* val: pid bytes pid bytes ... */
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
static int processes(const char *function, Device *d, unsigned *count, Process *out) {
    u64 v[128];
    int code = enter(function, d);
    if (code) return code;
    unsigned n = (unsigned)values(function, d, v, 128) / 2;
    unsigned room = *count;
    *count = n;
    if (n == 0) return SUCCESS;
    if (!out || room < n) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n; i++) out[i] = (Process){(unsigned)v[2 * i], v[2 * i + 1], 0, 0};
    return SUCCESS;
}
#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v3
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v3", d, count, out);
}
#endif
#ifndef WITHOUT_nvmlDeviceGetComputeRunningProcesses_v2
int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, unsigned *count, Process *out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v2", d, count, out);
}
#endif
