/* libnvidia-ml.so.1 for tests: answers NVML's functions from the file that NVML_SCRIPT names, read anew at each call.
 *
 *   gpus 1                  how many there are
 *   0.uuid GPU-a            what GPU 0 answers; what it does not answer it does not support
 *   0.temperature 60
 *   0.power.error 4         an NVML error instead of an answer
 *   0.lost 1                the device has fallen off the bus
 *   hang power              who asks for this is never answered
 *   xid 0 79                an event, told once to each listener that was there before
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10, LOST = 15 };
#define GPUS 16

typedef struct { int index; } Device;
typedef struct { int told; } Listener;
static Device devices[GPUS];

static int look(const char *key, char *value, size_t size) {
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], name[128], text[128];
    int found = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %127s", name, text) == 2 && !strcmp(name, key)) {
            snprintf(value, size, "%s", text);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static void hang_on(const char *what) {
    const char *path = getenv("NVML_SCRIPT");
    char line[256], text[128];
    for (;;) {
        FILE *file = path ? fopen(path, "r") : NULL;
        int hangs = 0;
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, "hang %127s", text) == 1 && !strcmp(text, what)) hangs = 1;
        if (file) fclose(file);
        if (!hangs) return;
        for (;;) pause(); /* a call into a sick driver does not come back when the driver does */
    }
}

static int answer_text(Device *device, const char *what, char *value, size_t size) {
    char key[160];
    hang_on(what);
    snprintf(key, sizeof key, "%d.lost", device->index);
    if (look(key, value, size) && atoi(value)) return LOST;
    snprintf(key, sizeof key, "%d.%s.error", device->index, what);
    if (look(key, value, size)) return atoi(value);
    snprintf(key, sizeof key, "%d.%s", device->index, what);
    return look(key, value, size) ? SUCCESS : NOT_SUPPORTED;
}

static int answer(Device *device, const char *what, unsigned long long *value) {
    char text[128];
    int code = answer_text(device, what, text, sizeof text);
    if (!code) *value = strtoull(text, NULL, 0);
    return code;
}

static int answer_int(Device *device, const char *what, unsigned int *value) {
    unsigned long long found = 0;
    int code = answer(device, what, &found);
    if (!code) *value = (unsigned int)found;
    return code;
}

int nvmlInitWithFlags(unsigned int flags) {
    char text[128];
    (void)flags;
    hang_on("init");
    for (int i = 0; i < GPUS; i++) devices[i].index = i;
    return look("gpus", text, sizeof text) ? SUCCESS : NO_DRIVER;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "scripted error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    char text[128];
    *count = look("gpus", text, sizeof text) ? (unsigned int)atoi(text) : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    char key[32], text[128];
    snprintf(key, sizeof key, "%u.lost", index);
    if (look(key, text, sizeof text) && atoi(text)) return LOST;
    *device = &devices[index];
    return index < GPUS ? SUCCESS : INVALID;
}

int nvmlDeviceGetIndex(Device *device, unsigned int *index) {
    char text[128];
    int code = answer_text(device, "index", text, sizeof text);
    *index = (unsigned int)device->index;
    return code == LOST ? LOST : SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned int size) { return answer_text(device, "uuid", uuid, size); }

/* --- events ------------------------------------------------------------------------------------------------------ */

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;

static int xid_after(int told, unsigned int *gpu, unsigned long long *xid, int *seen) {
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int found = 0;
    *seen = 0;
    while (file && fgets(line, sizeof line, file)) {
        unsigned int at;
        unsigned long long number;
        if (sscanf(line, "xid %u %llu", &at, &number) != 2) continue;
        if ((*seen)++ == told) {
            *gpu = at, *xid = number;
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

int nvmlEventSetCreate(Listener **listener) {
    unsigned int gpu;
    unsigned long long xid;
    *listener = calloc(1, sizeof **listener);
    xid_after(-1, &gpu, &xid, &(*listener)->told);
    return SUCCESS;
}

int nvmlEventSetFree(Listener *listener) {
    free(listener);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, Listener *listener) {
    char text[128];
    (void)types, (void)listener;
    int code = answer_text(device, "events", text, sizeof text);
    return code == NOT_SUPPORTED ? SUCCESS : code;
}

int nvmlEventSetWait_v2(Listener *listener, Event *event, unsigned int timeout_ms) {
    for (unsigned int waited = 0;; waited += 10) {
        unsigned int gpu;
        unsigned long long xid;
        int seen;
        hang_on("wait");
        if (xid_after(listener->told, &gpu, &xid, &seen)) {
            listener->told++;
            memset(event, 0, sizeof *event);
            event->device = &devices[gpu];
            event->type = 8;
            event->data = xid;
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(10000);
    }
}

/* --- questions --------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetTemperature(Device *device, unsigned int sensor, unsigned int *value) {
    (void)sensor;
    return answer_int(device, "temperature", value);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *value) { return answer_int(device, "power", value); }

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    memory[0] = memory[1] = 0;
    return answer(device, "memory", &memory[2]);
}

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, available, used;
} Memory;

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *memory) {
    memory->total = memory->reserved = memory->available = 0;
    return answer(device, "memory", &memory->used);
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned int kind, unsigned int counter, unsigned long long *value) {
    (void)counter;
    return answer(device, kind ? "ecc_uncorrected" : "ecc_corrected", value);
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned int *a, unsigned int *b, unsigned int *pending, unsigned int *failed) {
    *a = *b = *pending = *failed = 0;
    answer_int(device, "remap_pending", pending);
    return answer_int(device, "remap_failed", failed);
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned int *value) {
    return answer_int(device, "retirement_pending", value);
}

int nvmlDeviceGetRetiredPages(Device *device, unsigned int cause, unsigned int *count, unsigned long long *pages) {
    unsigned int have = 0;
    int code = answer_int(device, cause ? "retired_by_double" : "retired_by_single", &have);
    if (code) return code;
    if (*count < have || (have && !pages)) {
        *count = have;
        return TOO_SMALL;
    }
    for (unsigned int i = 0; i < have; i++) pages[i] = 4096ull * i;
    *count = have;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *value) {
    return answer(device, "throttle", value);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *value) {
    return answer(device, "old_throttle", value);
}

int nvmlDeviceGetClockInfo(Device *device, unsigned int kind, unsigned int *value) {
    (void)kind;
    return answer_int(device, "clock", value);
}

int nvmlDeviceGetMaxClockInfo(Device *device, unsigned int kind, unsigned int *value) {
    (void)kind;
    return answer_int(device, "clock_max", value);
}

int nvmlDeviceGetPcieReplayCounter(Device *device, unsigned int *value) { return answer_int(device, "pcie_replays", value); }

int nvmlDeviceGetNvLinkState(Device *device, unsigned int link, unsigned int *active) {
    unsigned int links = 0, down = 0;
    int code = answer_int(device, "links", &links);
    if (code) return code;
    answer_int(device, "links_down", &down);
    *active = link >= down;
    return link < links ? SUCCESS : INVALID;
}

typedef struct {
    uint32_t field, scope;
    int64_t at, latency;
    uint32_t type, code;
    union { double d; unsigned int ui; unsigned long long ull; } value;
} Field;

int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    char key[64];
    hang_on("fields");
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "field.%u.%u", fields[i].field, fields[i].scope);
        fields[i].type = 3;
        fields[i].code = (uint32_t)answer(device, key, &fields[i].value.ull);
    }
    return SUCCESS;
}

typedef struct {
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *processes) {
    char pid[128], memory[128];
    int code = answer_text(device, "process.pid", pid, sizeof pid);
    if (code == NOT_SUPPORTED) {
        *count = 0;
        return answer_text(device, "processes", pid, sizeof pid); /* `processes 0`: there are none */
    }
    if (code) return code;
    if (!processes || *count < 1) {
        *count = 1;
        return TOO_SMALL;
    }
    code = answer_text(device, "process.memory", memory, sizeof memory);
    processes[0] = (Process){.pid = (unsigned int)atoi(pid), .memory = strtoull(memory, NULL, 0)};
    *count = 1;
    return code;
}
