/* A child of fork that maps memory where its parent's rings lay, and exits with destructors and handlers. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

enum { RUNS = 16, APART = 256 << 10, PAGE = 4096, SPANS_MAX = 64, CHANGED = 77 };

struct span {
    unsigned char *from;
    size_t len;
};

static struct span rings[SPANS_MAX];
static size_t count;
static char memory[PAGE];

static void find_rings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL && count < SPANS_MAX) {
        unsigned long from, to;
        if (strstr(line, "io_uring") != NULL && sscanf(line, "%lx-%lx", &from, &to) == 2) {
            rings[count].from = (unsigned char *)from;
            rings[count++].len = to - from;
        }
    }
    fclose(maps);
}

/* A mapping that vanished raises SIGSEGV. */
static void compare(void) {
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at < rings[i].len; at += PAGE)
            if (rings[i].from[at] != 0xa5)
                _exit(CHANGED);
}

static void write_runs(struct millpond_file file) {
    memset(memory, 7, sizeof memory);
    for (int run = 0; run < RUNS; run++)
        RETURNS(PAGE, millpond_write(file, memory, PAGE, (uint64_t)run * APART));
    RETURNS(0, millpond_sync(file));
}

int main(void) {
    struct millpond_engine engine = new_engine();
    struct millpond_open_options options = open_options(O_RDWR | O_CREAT);
    struct millpond_file file;
    struct millpond_queue queue;
    int status;
    pid_t child;

    options.write_mode = MILLPOND_WRITE_BACK;
    RETURNS(0, millpond_open(engine, "forked", &options, &file));
    RETURNS(0, millpond_queue_create(engine, 4, &queue));
    /* A sync of several extents sets up a ring of this thread. */
    write_runs(file);
    find_rings();
    if (count == 0)
        puts("SKIPPED: no io_uring");
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < count; i++) {
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
            void *at = mmap(rings[i].from, rings[i].len, PROT_READ | PROT_WRITE, flags, -1, 0);
            CHECK(at == (void *)rings[i].from);
            memset(at, 0xa5, rings[i].len);
        }
        atexit(compare);
        RETURNS(-EBADF, millpond_close(file));
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    write_runs(file);
    RETURNS(PAGE, millpond_read(file, memory, PAGE, APART));
    CHECK(memory[0] == 7 && memory[PAGE - 1] == 7);
    RETURNS(0, millpond_queue_destroy(queue));
    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_engine_destroy(engine));
    return 0;
}
