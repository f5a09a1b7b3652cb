/* Borrowed descriptors, direct I/O and pipelines. Run in an empty directory. */
#define _GNU_SOURCE
#include "check.h"

#include <sys/wait.h>

static struct millpond_engine engine;
static char memory[8192];

/* Whether another process finds a lock of this process on the file. */
static int is_locked(const char *path) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int fd = open(path, O_RDWR);
        _exit(fd >= 0 && fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* A call that fails closes no descriptor of the file, as that would drop the locks. */
static void locks_stay(void) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct millpond_open_options options = open_options(O_RDWR);
    struct millpond_file file, other;
    int fd = open("locked", O_RDWR | O_CREAT, 0600);

    CHECK(fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0 && is_locked("locked"));
    options.page_bytes = 4097;
    RETURNS(-EINVAL, millpond_open_descriptor(engine, fd, &options, &other));
    CHECK(is_locked("locked"));
    options = open_options(O_RDWR);
    RETURNS(0, millpond_open_descriptor(engine, fd, &options, &file));
    options.page_bytes = 8192; /* differs from the open file's page size */
    RETURNS(-EINVAL, millpond_open_descriptor(engine, fd, &options, &other));
    CHECK(is_locked("locked"));
    RETURNS(0, millpond_close(file));
    CHECK(!is_locked("locked")); /* as after any close(2) of the file */
    close(fd);
}

static void direct(void) {
    struct millpond_open_options options = open_options(O_RDWR | O_CREAT | O_DIRECT);
    struct millpond_request requests[2];
    struct millpond_completion done[2];
    struct millpond_queue queue;
    struct millpond_file file;
    void *buffers[3], *none[1] = {memory};
    int error;

    RETURNS(0, millpond_buffers_alloc(engine, 3, 4096, buffers));
    CHECK((uintptr_t)buffers[2] % 4096 == 0);
    RETURNS(-EINVAL, millpond_buffers_alloc(engine, 1, 0, none));
    RETURNS(-EINVAL, millpond_buffers_alloc(engine, SIZE_MAX, 4096, none));
    RETURNS(-EFAULT, millpond_buffers_alloc(engine, 1, 1, NULL));
    RETURNS(-EBADF, millpond_buffers_alloc((struct millpond_engine){0}, 1, 1, none));
    RETURNS(-EINVAL, millpond_buffers_free(none, 1));
    RETURNS(-EFAULT, millpond_buffers_free(NULL, 1));
    RETURNS(0, millpond_buffers_free(NULL, 0));
    error = millpond_open(engine, "direct", &options, &file);
    if (error == -EINVAL)
        puts("SKIPPED: no direct I/O here");
    else {
        RETURNS(0, error);
        memset(buffers[0], 'd', 4096);
        memset(buffers[1], 'e', 4096);
        RETURNS(4096, millpond_write(file, buffers[0], 4096, 0));
        RETURNS(-EINVAL, millpond_read(file, buffers[2], 10, 1));
        RETURNS(-EINVAL, millpond_try_read(file, buffers[2], 4096, 0));
        RETURNS(0, millpond_queue_create(engine, 2, &queue));
        requests[0] = request(MILLPOND_OP_WRITE, file, buffers[1], 4096, 4096);
        requests[1] = request(MILLPOND_OP_READ, file, buffers[2], 4096, 0);
        RETURNS(2, millpond_queue_submit(queue, requests, 2));
        RETURNS(2, millpond_queue_wait(queue, done, 2, 2, -1));
        CHECK(done[0].result == 4096 && done[1].result == 4096);
        CHECK(memcmp(buffers[0], buffers[2], 4096) == 0);
        requests[1] = request(MILLPOND_OP_READ, file, buffers[2], 4095, 0);
        RETURNS(1, millpond_queue_submit(queue, &requests[1], 1));
        RETURNS(1, millpond_queue_wait(queue, done, 1, 1, -1));
        CHECK(done[0].result == -EINVAL);
        RETURNS(0, millpond_queue_destroy(queue));
        RETURNS(0, millpond_close(file));
        options.extra = MILLPOND_OPEN_BOUNCE;
        RETURNS(0, millpond_open(engine, "direct", &options, &file));
        RETURNS(10, millpond_read(file, memory, 10, 4091));
        CHECK(memcmp(memory, "dddddeeeee", 10) == 0);
        RETURNS(0, millpond_close(file));
    }
    RETURNS(0, millpond_buffers_free(buffers, 1));
    RETURNS(-EINVAL, millpond_buffers_free(buffers, 3)); /* one of them twice: none is freed */
    RETURNS(0, millpond_buffers_free(buffers + 1, 2));
}

/* A pipeline that writes the file, one piece per request, and reads it in another order. */
enum { PIECES = 64, PIECE = 8192, LANES = 5 };

struct work {
    struct millpond_file file;
    void **buffers;
    int given, ended;
    int is_write;
    size_t lanes_seen;
};

static int next_piece(void *context, struct millpond_lane *lane) {
    struct work *work = context;
    unsigned char *memory;
    CHECK(lane->number < LANES);
    work->lanes_seen |= (size_t)1 << lane->number;
    memory = work->buffers[lane->number];
    if (lane->request.op != 0) {
        CHECK(lane->result == PIECE);
        work->ended++;
        for (size_t i = 0; i < PIECE; i++)
            CHECK(memory[i] == (unsigned char)(lane->request.offset / PIECE + i % 7));
    } else
        CHECK(lane->result == 0);
    if (work->given == PIECES)
        return 0;
    lane->request = request(work->is_write ? MILLPOND_OP_WRITE : MILLPOND_OP_READ, work->file, memory, PIECE,
                            (uint64_t)(work->is_write ? work->given : PIECES - 1 - work->given) * PIECE);
    work->given++;
    if (work->is_write)
        for (size_t i = 0; i < PIECE; i++)
            memory[i] = (unsigned char)(lane->request.offset / PIECE + i % 7);
    else
        memset(memory, 0xee, PIECE);
    return 1;
}

/* Each request has a different error, which the next step receives. */
static int next_mistake(void *context, struct millpond_lane *lane) {
    static struct iovec vector = {NULL, 1};
    static const int errors[] = {0, -EBADF, -EINVAL, -EINVAL, -EINVAL, -EFAULT, -EFAULT, -EINVAL, -EINVAL, -EINVAL};
    struct work *work = context;
    size_t number = (size_t)work->given++;
    RETURNS(errors[number], lane->result);
    lane->request = request(MILLPOND_OP_READ, work->file, work->buffers[0], PIECE, 0);
    switch (number) {
    case 0: lane->request.file.id ^= 1; break;
    case 1: lane->request.op = MILLPOND_OP_SYNC; break;
    case 2: lane->request.flags = 1; break;
    case 3: lane->request.reserved[1] = 1; break;
    case 4: lane->request.memory = NULL; break;
    case 5: lane->request.op = MILLPOND_OP_WRITEV, lane->request.memory = &vector, lane->request.len = 1; break;
    case 6: lane->request.offset = 1; break; /* not aligned */
    case 7: lane->request.offset = UINT64_MAX; break;
    case 8: lane->request.op = MILLPOND_OP_READV, lane->request.len = SIZE_MAX; break;
    default: return 0;
    }
    return 1;
}

/* The handle is closed while the file has a request in flight. */
static int close_at_once(void *context, struct millpond_lane *lane) {
    struct work *work = context;
    if (lane->request.op != 0) {
        CHECK(lane->result == (work->given == 1 ? PIECE : -EBADF));
        if (work->given++ == 2)
            return 0;
    } else
        work->given = 1;
    lane->request = request(MILLPOND_OP_READ, work->file, work->buffers[0], PIECE, 0);
    if (work->ended++ == 1)
        RETURNS(0, millpond_close(work->file));
    return 1;
}

static int not_direct(void *context, struct millpond_lane *lane) {
    struct work *work = context;
    if (lane->request.op != 0) {
        CHECK(lane->result == -EINVAL);
        return 0;
    }
    lane->request = request(MILLPOND_OP_READ, work->file, work->buffers[0], PIECE, 0);
    return 1;
}

static void pipelines(void) {
    struct millpond_open_options options = open_options(O_RDWR | O_CREAT | O_DIRECT);
    struct millpond_file plain = open_file(engine, "pipeline", O_RDWR | O_CREAT);
    void *buffers[LANES], *others[LANES];
    struct work work = {0};
    int error;

    RETURNS(-EBADF, millpond_pipeline_run((struct millpond_engine){0}, 1, next_piece, &work));
    RETURNS(-EINVAL, millpond_pipeline_run(engine, 0, next_piece, &work));
    RETURNS(-EINVAL, millpond_pipeline_run(engine, 4097, next_piece, &work));
    RETURNS(-EFAULT, millpond_pipeline_run(engine, 1, NULL, &work));
    RETURNS(0, millpond_buffers_alloc(engine, LANES, PIECE, buffers));
    work.buffers = buffers;
    work.file = plain;
    RETURNS(0, millpond_pipeline_run(engine, 1, not_direct, &work));
    error = millpond_open(engine, "pipeline", &options, &work.file);
    if (error == -EINVAL)
        puts("SKIPPED: no direct I/O here");
    else {
        RETURNS(0, error);
        for (int round = 0; round < 4; round++) {
            /* With memory that can be registered, and memory that can't. */
            work.buffers = round < 2 ? buffers : others;
            for (int lane = 0; round == 2 && lane < LANES; lane++)
                CHECK(posix_memalign(&others[lane], 4096, PIECE) == 0);
            work.is_write = round % 2 == 0;
            work.given = work.ended = 0;
            work.lanes_seen = 0;
            RETURNS(0, millpond_pipeline_run(engine, LANES, next_piece, &work));
            CHECK(work.ended == PIECES && work.lanes_seen == (1 << LANES) - 1);
            RETURNS(PIECES * PIECE, millpond_len(plain)); /* coherent with the cache */
            RETURNS(1, millpond_read(plain, memory, 1, PIECE * 9));
            CHECK(memory[0] == 9);
        }
        work.given = 0;
        RETURNS(0, millpond_pipeline_run(engine, 1, next_mistake, &work));
        CHECK(work.given == 10);
        work.given = work.ended = 0;
        RETURNS(0, millpond_pipeline_run(engine, 1, close_at_once, &work));
        RETURNS(-EBADF, millpond_len(work.file));
        for (int lane = 0; lane < LANES; lane++)
            free(others[lane]);
    }
    RETURNS(0, millpond_buffers_free(buffers, LANES));
    RETURNS(0, millpond_close(plain));
}

int main(void) {
    engine = new_engine();
    locks_stay();
    direct();
    pipelines();
    RETURNS(0, millpond_engine_destroy(engine));
    puts("all calls checked");
    return 0;
}
