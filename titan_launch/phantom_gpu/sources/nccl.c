/* NCCL between processes of one host, without GPUs. Small messages are delivered, because control flow depends on them:
 * every rank of a collective writes its part into a file, and reads the parts of the others. A call with a larger message
 * returns at once and changes nothing. Sender and receiver both know the type and size that decide if a message is small. */
#define _GNU_SOURCE
#include "phantom.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGEST_OF_NUMBERS ((size_t)64 << 10) /* bytes of floating-point numbers */
#define LARGEST_OF_INTEGERS ((size_t)8 << 20)
enum { SUCCESS = 0, REMOTE_ERROR = 6, NEVER_CAME = -1 };
enum { SUM, PROD, MAX, MIN, AVG, NUM_OPS };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, NUM_KNOWN };
static const int WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct communicator {
    int size, rank, splits;
    volatile int is_aborted;
    uint64_t id;
    unsigned long collectives; /* begun by this rank */
    unsigned long batch, earlier; /* number of the first collective in the current group of calls, and in the previous group */
    int has_pending;
    unsigned long *sent, *received; /* numbers of messages to and from each rank */
};
typedef struct { char bytes[128]; } unique_id;
typedef struct communicator *comm_t;

static void path_of(char *path, comm_t comm, char kind, int from, int to, unsigned long number) {
    snprintf(path, 512, "%s/phantom-%016lx-%c-%d-%d-%lu", setting("PHANTOM_FOLDER", "/dev/shm"), (unsigned long)comm->id, kind, from, to, number);
}

static void post(comm_t comm, char kind, int to, unsigned long number, const void *data, size_t bytes) {
    char path[512], part[520];
    path_of(path, comm, kind, comm->rank, to, number);
    snprintf(part, sizeof part, "%s.part", path);
    int file = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) fail("%s cannot be written: %s", part, strerror(errno));
    for (size_t done = 0; done < bytes;) {
        ssize_t written = write(file, (const char *)data + done, bytes - done);
        if (written < 0) fail("%s cannot be written: %s", part, strerror(errno));
        done += written;
    }
    close(file);
    rename(part, path);
}

/* Wait for a message, and read `bytes` bytes of it from `offset` on. On a GPU, the stream would wait, and the host would not.
 * Here the host waits, for at most PHANTOM_PATIENCE seconds. After that, the stream hangs, as it would on a GPU. */
static int fetch(comm_t comm, char kind, int from, int to, unsigned long number, void *data, size_t offset, size_t bytes) {
    char path[512];
    path_of(path, comm, kind, from, to, number);
    int file;
    for (unsigned waits = 0; (file = open(path, O_RDONLY)) < 0; waits++) {
        if (comm->is_aborted) return REMOTE_ERROR;
        if (waits > 100 + 1000 * (unsigned)atoi(setting("PHANTOM_PATIENCE", "300"))) return NEVER_CAME;
        usleep(waits < 100 ? 50 : 1000);
    }
    size_t done = 0;
    for (ssize_t got; done < bytes && (got = pread(file, (char *)data + done, bytes - done, offset + done)) > 0;) done += got;
    close(file);
    return SUCCESS;
}

static void forget(comm_t comm, unsigned long number) {
    char path[512];
    path_of(path, comm, 'c', comm->rank, -1, number);
    unlink(path);
}

/* Numbers */
static float from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits >> 15 ? -value : value;
}
static uint16_t to_half(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    value = fabsf(value);
    if (isnan(value)) return 0x7e00;
    if (value >= 65520.f) return sign | 0x7c00;
    if (value < 6.103515625e-05f) return sign | (uint16_t)lrintf(ldexpf(value, 24));
    int exponent;
    float fraction = frexpf(value, &exponent); /* in [0.5, 1) */
    return sign | (uint16_t)(((exponent + 14) << 10) + lrintf(ldexpf(fraction, 11)) - 1024);
}
static float from_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    return memcpy(&value, &wide, 4), value;
}
static uint16_t to_bfloat(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return isnan(value) ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
static double number(const void *data, int type, size_t i) {
    switch (type) {
    case INT8: return ((const int8_t *)data)[i];
    case UINT8: return ((const uint8_t *)data)[i];
    case INT32: return ((const int32_t *)data)[i];
    case UINT32: return ((const uint32_t *)data)[i];
    case FLOAT16: return from_half(((const uint16_t *)data)[i]);
    case FLOAT32: return ((const float *)data)[i];
    case FLOAT64: return ((const double *)data)[i];
    case BFLOAT16: return from_bfloat(((const uint16_t *)data)[i]);
    default: return 0;
    }
}
static void set_number(void *data, int type, size_t i, double value) {
    switch (type) {
    case INT8: ((int8_t *)data)[i] = (int8_t)value; break;
    case UINT8: ((uint8_t *)data)[i] = (uint8_t)value; break;
    case INT32: ((int32_t *)data)[i] = (int32_t)value; break;
    case UINT32: ((uint32_t *)data)[i] = (uint32_t)value; break;
    case FLOAT16: ((uint16_t *)data)[i] = to_half((float)value); break;
    case FLOAT32: ((float *)data)[i] = (float)value; break;
    case FLOAT64: ((double *)data)[i] = value; break;
    case BFLOAT16: ((uint16_t *)data)[i] = to_bfloat((float)value); break;
    }
}

static struct { double factor; } scaled[1024]; /* operations of ncclRedOpCreatePreMulSum */
static int num_scaled;

static double merged(int op, double a, double b) {
    switch (op) {
    case PROD: return a * b;
    case MAX: return isnan(a) || a > b ? a : b;
    case MIN: return isnan(a) || a < b ? a : b;
    default: return a + b;
    }
}
static int64_t merged_integers(int op, int64_t a, int64_t b) {
    switch (op) {
    case PROD: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    default: return a + b;
    }
}

/* Reduce `count` elements of all ranks, `parts[rank]`, in the order of the ranks. */
static void reduce(void *out, char **parts, int ranks, int type, int op, size_t count) {
    double factor = op >= NUM_OPS ? scaled[(op - NUM_OPS) % 1024].factor : op == AVG ? 1.0 / ranks : 1;
    for (size_t i = 0; i < count; i++) {
        if (type == INT64 || type == UINT64) { /* a double has only 53 bits */
            int64_t sum = ((int64_t *)parts[0])[i];
            for (int r = 1; r < ranks; r++) sum = merged_integers(op, sum, ((int64_t *)parts[r])[i]);
            ((int64_t *)out)[i] = op == AVG ? sum / ranks : sum;
            continue;
        }
        double sum = number(parts[0], type, i);
        for (int r = 1; r < ranks; r++) sum = merged(op, sum, number(parts[r], type, i));
        set_number(out, type, i, op == AVG || op >= NUM_OPS ? sum * factor : sum);
    }
}

/* Collectives. A call sends this rank's part at once, and receives at the end of its group of calls. Otherwise a rank could
 * wait for a message that another rank sends later in the same group. */
enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, ALL_TO_ALL, BROADCAST, RECEIVE };
struct call { enum kind kind; comm_t comm; void *stream; char *out; size_t bytes, count; int type, op, peer; unsigned long number; };
static __thread struct call *pending;
static __thread size_t num_pending, room_pending;
static __thread int depth;

static int is_small(int type, size_t bytes) {
    return type < NUM_KNOWN && bytes <= (type < FLOAT16 ? LARGEST_OF_INTEGERS : LARGEST_OF_NUMBERS);
}

static int exchange(const struct call *call) {
    comm_t comm = call->comm;
    int status = SUCCESS, is_member = call->kind != REDUCE && call->kind != GATHER;
    is_member |= comm->rank == call->peer;
    if (call->kind == RECEIVE) {
        status = fetch(comm, 'p', call->peer, comm->rank, call->number, call->out, 0, call->bytes);
        char path[512];
        path_of(path, comm, 'p', call->peer, comm->rank, call->number);
        unlink(path);
        return status;
    }
    char **parts = malloc(comm->size * sizeof *parts);
    size_t offset = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL ? comm->rank * call->bytes : 0;
    for (int r = 0; r < comm->size; r++) {
        parts[r] = calloc(1, call->bytes + 1);
        if (status == SUCCESS) status = fetch(comm, 'c', r, -1, call->number, parts[r], offset, is_member ? call->bytes : 0);
    }
    if (status == SUCCESS && is_member) {
        if (call->kind == BROADCAST) memcpy(call->out, parts[call->peer], call->bytes);
        else if (call->kind <= REDUCE_SCATTER) reduce(call->out, parts, comm->size, call->type, call->op, call->count);
        else for (int r = 0; r < comm->size; r++) memcpy(call->out + r * call->bytes, parts[r], call->bytes);
    }
    for (int r = 0; r < comm->size; r++) free(parts[r]);
    free(parts);
    return status;
}

static int finish(const struct call *call) {
    if (stream_of(call->stream)->hangs) return SUCCESS;
    int status = exchange(call);
    if (status != NEVER_CAME) return status;
    stream_of(call->stream)->hangs = 1;
    return SUCCESS;
}

static int end_or_keep(struct call call) {
    if (!depth) return finish(&call);
    if (num_pending == room_pending) pending = realloc(pending, (room_pending = 2 * room_pending + 16) * sizeof *pending);
    pending[num_pending++] = call;
    return SUCCESS;
}

/* PHANTOM_HANG="rank:number" lets the stream of the `number`-th call of NCCL on that rank hang. */
static void hang_if_asked(void *stream) {
    static unsigned long calls;
    int rank;
    unsigned long number;
    if (sscanf(setting("PHANTOM_HANG", ""), "%d:%lu", &rank, &number) == 2 && rank == atoi(setting("RANK", "0")) && ++calls == number)
        stream_of(stream)->hangs = 1;
}

/* `bytes`: size of a rank's part of the result. `sent`: number of bytes that this rank contributes. */
static int collective(enum kind kind, const void *in, void *out, size_t count, int type, int op, int root, comm_t comm, void *stream) {
    size_t bytes = count * WIDTH[type];
    int sends_all = kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
    size_t sent = sends_all ? bytes * comm->size : kind == BROADCAST && comm->rank != root ? 0 : bytes;
    hang_if_asked(stream);
    if (stream_of(stream)->hangs || !is_small(type, sends_all ? bytes * comm->size : bytes)) return SUCCESS;
    unsigned long number = comm->collectives++;
    /* This rank has ended the previous batch. So all ranks have begun that batch, and have ended the one before it, whose files are removed. */
    if (!comm->has_pending) {
        while (comm->earlier < comm->batch) forget(comm, comm->earlier++);
        comm->batch = number;
    }
    comm->has_pending = depth > 0;
    post(comm, 'c', -1, number, in, sent);
    return end_or_keep((struct call){kind, comm, stream, out, bytes, count, type, op, root, number});
}

int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, comm_t comm, void *stream) { return collective(ALL_REDUCE, in, out, count, type, op, 0, comm, stream); }
int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, comm_t comm, void *stream) { return collective(REDUCE, in, out, count, type, op, root, comm, stream); }
int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, comm_t comm, void *stream) { return collective(REDUCE_SCATTER, in, out, count, type, op, 0, comm, stream); }
int ncclAllGather(const void *in, void *out, size_t count, int type, comm_t comm, void *stream) { return collective(ALL_GATHER, in, out, count, type, SUM, 0, comm, stream); }
int ncclGather(const void *in, void *out, size_t count, int type, int root, comm_t comm, void *stream) { return collective(GATHER, in, out, count, type, SUM, root, comm, stream); }
int ncclAlltoAll(const void *in, void *out, size_t count, int type, comm_t comm, void *stream) { return collective(ALL_TO_ALL, in, out, count, type, SUM, 0, comm, stream); }
int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, comm_t comm, void *stream) { return collective(BROADCAST, in, out, count, type, SUM, root, comm, stream); }
int ncclBcast(void *data, size_t count, int type, int root, comm_t comm, void *stream) { return ncclBroadcast(data, data, count, type, root, comm, stream); }

int ncclSend(const void *in, size_t count, int type, int peer, comm_t comm, void *stream) {
    hang_if_asked(stream);
    if (stream_of(stream)->hangs || !is_small(type, count * WIDTH[type])) return SUCCESS;
    post(comm, 'p', peer, comm->sent[peer]++, in, count * WIDTH[type]);
    return SUCCESS;
}
int ncclRecv(void *out, size_t count, int type, int peer, comm_t comm, void *stream) {
    hang_if_asked(stream);
    if (stream_of(stream)->hangs || !is_small(type, count * WIDTH[type])) return SUCCESS;
    return end_or_keep((struct call){RECEIVE, comm, stream, out, count * WIDTH[type], count, type, SUM, peer, comm->received[peer]++});
}
int ncclGroupStart(void) { return depth++, SUCCESS; }
int ncclGroupEnd(void) {
    if (--depth) return SUCCESS;
    int status = SUCCESS;
    for (size_t i = 0; i < num_pending; i++) {
        int ended = finish(&pending[i]);
        pending[i].comm->has_pending = 0;
        if (ended != SUCCESS) status = ended;
    }
    num_pending = 0;
    return status;
}
int ncclGroupSimulateEnd(void *information) { return ncclGroupEnd(); }
int ncclRedOpCreatePreMulSum(int *op, const void *factor, int type, int residence, comm_t comm) {
    scaled[num_scaled % 1024].factor = number(factor, type, 0);
    return *op = NUM_OPS + num_scaled++, SUCCESS;
}

/* Communicators */
static comm_t new_communicator(int size, int rank, uint64_t id) {
    comm_t comm = calloc(1, sizeof *comm);
    comm->size = size, comm->rank = rank, comm->id = id;
    comm->sent = calloc(size, sizeof *comm->sent), comm->received = calloc(size, sizeof *comm->received);
    return comm;
}
int ncclGetUniqueId(unique_id *id) {
    int file = open("/dev/urandom", O_RDONLY);
    if (file < 0 || read(file, id, sizeof *id) != sizeof *id) fail("/dev/urandom cannot be read");
    close(file);
    return SUCCESS;
}
int ncclCommInitRankConfig(comm_t *comm, int size, unique_id id, int rank, void *config) {
    uint64_t number;
    memcpy(&number, &id, sizeof number);
    return *comm = new_communicator(size, rank, number), SUCCESS;
}
int ncclCommInitRank(comm_t *comm, int size, unique_id id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, 0); }
int ncclCommInitRankScalable(comm_t *comm, int size, int rank, int ids, unique_id *id, void *config) { return ncclCommInitRankConfig(comm, size, *id, rank, config); }
int ncclCommSplit(comm_t comm, int color, int key, comm_t *made, void *config) {
    int mine[2] = {color, key}, (*all)[2] = malloc(comm->size * sizeof *all), size = 0, rank = 0;
    int status = collective(ALL_GATHER, mine, all, 2, INT32, SUM, 0, comm, 0);
    for (int r = 0; status == SUCCESS && r < comm->size; r++) {
        if (all[r][0] != color) continue;
        size++;
        rank += all[r][1] < key || (all[r][1] == key && r < comm->rank);
    }
    free(all);
    comm->splits++;
    uint64_t id = (comm->id ^ (uint64_t)(color + 1) << 32 ^ (uint64_t)comm->splits) * 0x9e3779b97f4a7c15u;
    *made = color < 0 ? 0 : new_communicator(size, rank, id);
    return status;
}
/* Nothing is freed: other ranks may still read the last files of this rank, and threads may be in calls. The process that created the folder removes it. */
int ncclCommDestroy(comm_t comm) { return SUCCESS; }
int ncclCommFinalize(comm_t comm) { return SUCCESS; }
int ncclCommAbort(comm_t comm) {
    if (comm) comm->is_aborted = 1;
    return SUCCESS;
}
int ncclCommRevoke(comm_t comm, int flags) { return ncclCommAbort(comm); }
int ncclCommCount(comm_t comm, int *size) { return *size = comm->size, SUCCESS; }
int ncclCommUserRank(comm_t comm, int *rank) { return *rank = comm->rank, SUCCESS; }
int ncclCommGetAsyncError(comm_t comm, int *error) { return *error = SUCCESS; }
int ncclCommGetUniqueId(comm_t comm, unique_id *id) { return ncclGetUniqueId(id); }
int ncclMemAlloc(void **address, size_t bytes) { return (*address = reserve_address_space(bytes, 0)) ? SUCCESS : REMOTE_ERROR; }
int ncclMemFree(void *address) { return release_address_space(address), SUCCESS; }
int ncclGetVersion(int *version) { return *version = 22800, SUCCESS; }
const char *ncclGetErrorString(int error) { return error ? "an error of the phantom GPU" : "no error"; }
const char *ncclGetLastError(comm_t comm) { return ""; }
