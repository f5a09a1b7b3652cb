/* One run of a pipeline over more files than the process may have open: each is closed in its next step. Run in an
 * empty directory. */
#define _GNU_SOURCE
#include <sys/resource.h>

#include "check.h"

enum { FILES = 200, LANES = 4, OPEN_MAX_NOW = 64, PIECE = 4096, PIECES = 2 };

struct work {
    struct millpond_engine engine;
    struct millpond_file open[LANES];
    int number[LANES];
    void *buffers[LANES];
    int opened, read;
};

/* Files that lose their second half after they were opened: the length that a read finds is in doubt. */
static int is_cut(int number) { return number % 3 == 1; }

static void path_of(int number, char *path, size_t bytes) { snprintf(path, bytes, "file%d", number); }

/* Opens, reads and closes one file after the other. Each has its own content, so a read of another one shows. */
static int next_file(void *context, struct millpond_lane *lane) {
    struct millpond_open_options options = open_options(O_RDONLY | O_DIRECT);
    struct work *work = context;
    const size_t at = lane->number;
    unsigned char *memory = work->buffers[at];
    char path[32];

    if (lane->request.op != 0) {
        const int pieces = is_cut(work->number[at]) ? 1 : PIECES;
        CHECK(lane->result == pieces * PIECE);
        for (int i = 0; i < pieces * PIECE; i++)
            CHECK(memory[i] == (unsigned char)work->number[at]);
        work->read++;
        RETURNS(0, millpond_close(work->open[at]));
    }
    if (work->opened == FILES)
        return 0;
    work->number[at] = work->opened++;
    path_of(work->number[at], path, sizeof path);
    RETURNS(0, millpond_open(work->engine, path, &options, &work->open[at]));
    if (is_cut(work->number[at]))
        CHECK(truncate(path, PIECE) == 0);
    memset(memory, 0xee, PIECES * PIECE);
    lane->request = request(MILLPOND_OP_READ, work->open[at], memory, PIECES * PIECE, 0);
    return 1;
}

static void write_files(void) {
    static char content[PIECES * PIECE];
    char path[32];
    for (int number = 0; number < FILES; number++) {
        int fd;
        path_of(number, path, sizeof path);
        memset(content, number, sizeof content);
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        CHECK(fd >= 0 && write(fd, content, sizeof content) == sizeof content);
        close(fd);
    }
}

static void run_with(uint32_t backend) {
    struct millpond_open_options direct = open_options(O_RDONLY | O_DIRECT);
    struct millpond_engine_options options;
    struct work work = {0};
    struct millpond_file file;
    int error;

    write_files();
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.cache_bytes = 4 << 20;
    options.backend = backend;
    error = millpond_engine_create(&options, &work.engine);
    if (error != 0) {
        printf("SKIPPED: backend %u: %d\n", (unsigned)backend, error);
        return;
    }
    error = millpond_open(work.engine, "file0", &direct, &file);
    if (error == -EINVAL)
        puts("SKIPPED: no direct I/O here");
    else {
        RETURNS(0, error);
        RETURNS(0, millpond_close(file));
        RETURNS(0, millpond_buffers_alloc(work.engine, LANES, PIECES * PIECE, work.buffers));
        RETURNS(0, millpond_pipeline_run(work.engine, LANES, next_file, &work));
        CHECK(work.read == FILES);
        RETURNS(0, millpond_buffers_free(work.buffers, LANES));
    }
    RETURNS(0, millpond_engine_destroy(work.engine));
}

int main(void) {
    struct rlimit limit = {OPEN_MAX_NOW, OPEN_MAX_NOW};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    run_with(MILLPOND_BACKEND_URING);
    run_with(MILLPOND_BACKEND_THREADS);
    return 0;
}
