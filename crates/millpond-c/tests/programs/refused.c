/* Lists as long as a call that find no memory. Run in an empty directory. */
#define _GNU_SOURCE
#include "check.h"

#include <stdint.h>

enum { MANY = 1 << 15, LANES = 2048 };

/* The library's allocator calls this, too. */
extern void *__libc_malloc(size_t bytes);

static size_t refused_bytes = SIZE_MAX;

void *malloc(size_t bytes) {
    if (bytes >= refused_bytes) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_malloc(bytes);
}

static void refuse(void) { refused_bytes = 96 << 10; }
static void allow(void) { refused_bytes = SIZE_MAX; }

static struct millpond_request requests[MANY];
static struct millpond_completion done[MANY];
static void *buffers[MANY];
static char memory[MANY];

static int no_request(void *context, struct millpond_lane *lane) {
    (void)context;
    (void)lane;
    return 0;
}

int main(void) {
    struct millpond_engine engine = new_engine();
    struct millpond_file file = open_file(engine, "file", O_RDWR | O_CREAT);
    struct millpond_queue queue;

    CHECK(millpond_write(file, "a pond", 6, 0) == 6);
    RETURNS(0, millpond_queue_create(engine, MANY, &queue));
    for (int i = 0; i < MANY; i++)
        requests[i] = request(MILLPOND_OP_READ, file, memory + i, 1, 0);
    refuse();
    RETURNS(-ENOMEM, millpond_queue_submit(queue, requests, MANY));
    RETURNS(8, millpond_queue_submit(queue, requests, 8));
    allow();
    RETURNS(8, millpond_queue_wait(queue, done, 8, MANY, -1));
    RETURNS(MANY, millpond_queue_submit(queue, requests, MANY));
    RETURNS(MANY, millpond_queue_wait(queue, done, MANY, MANY, -1));
    CHECK(memory[0] == 'a' && memory[MANY - 1] == 'a');
    RETURNS(0, millpond_queue_destroy(queue));

    refuse();
    RETURNS(-ENOMEM, millpond_buffers_alloc(engine, MANY, 4096, buffers));
    allow();
    RETURNS(0, millpond_buffers_alloc(engine, MANY, 4096, buffers));
    refuse();
    RETURNS(-ENOMEM, millpond_buffers_free(buffers, MANY));
    allow();
    RETURNS(0, millpond_buffers_free(buffers, MANY));

    refuse();
    RETURNS(-ENOMEM, millpond_pipeline_run(engine, LANES, no_request, NULL));
    allow();
    RETURNS(0, millpond_pipeline_run(engine, LANES, no_request, NULL));

    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_engine_destroy(engine));
    return 0;
}
