/* Threads that use handles while other threads close them. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

enum { READERS = 3, FILE_BYTES = 16384 };

/* The default number of rounds. */
static int rounds = 2000;

static struct millpond_engine engine;
static _Atomic uint64_t shared; /* the id of the file that is open, or was last open */
static atomic_bool over;
static pthread_key_t at_exit;

static void *reader(void *arg) {
    char bytes[FILE_BYTES];
    long served = 0;
    (void)arg;
    pthread_setspecific(at_exit, bytes);
    while (!atomic_load(&over)) {
        struct millpond_file file = {atomic_load(&shared)};
        int64_t moved = millpond_read(file, bytes, sizeof bytes, 0);
        CHECK(moved == FILE_BYTES || moved == -EBADF);
        if (moved < 0)
            continue;
        served++;
        for (size_t i = 0; i < sizeof bytes; i += 512)
            CHECK(bytes[i] == bytes[0]); /* all bytes are from one write */
    }
    return (void *)served;
}

/* Runs when the thread's local storage may be destroyed already. */
static void late(void *arg) {
    struct millpond_file file = {atomic_load(&shared)};
    int64_t len = millpond_len(file);
    (void)arg;
    CHECK(len == FILE_BYTES || len == -EBADF);
}

static struct millpond_file open_shared(void) {
    struct millpond_file file = open_file(engine, "shared", O_RDWR | O_CREAT);
    atomic_store(&shared, file.id);
    return file;
}

static void closing(void) {
    static char bytes[FILE_BYTES];
    struct millpond_file kept = open_file(engine, "shared", O_RDWR | O_CREAT);
    pthread_t threads[READERS];
    long served = 0;

    CHECK(pthread_key_create(&at_exit, late) == 0);
    RETURNS(FILE_BYTES, millpond_write(kept, bytes, sizeof bytes, 0));
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_create(&threads[i], NULL, reader, NULL) == 0);
    for (int round = 0; round < rounds; round++) {
        struct millpond_file file = open_shared();
        if (round % 16 == 0) {
            memset(bytes, round, sizeof bytes);
            RETURNS(FILE_BYTES, millpond_write(file, bytes, sizeof bytes, 0));
        }
        RETURNS(0, millpond_close(file));
        RETURNS(-EBADF, millpond_close(file));
    }
    atomic_store(&over, 1);
    for (int i = 0; i < READERS; i++) {
        void *count;
        CHECK(pthread_join(threads[i], &count) == 0);
        served += (long)count;
    }
    printf("%ld reads beside %d closes\n", served, rounds);
    RETURNS(0, millpond_close(kept));
}

static struct millpond_queue queue;
static _Atomic pid_t waiting;

static void *waiter(void *arg) {
    struct millpond_completion done[2];
    (void)arg;
    atomic_store(&waiting, gettid());
    RETURNS(1, millpond_queue_wait(queue, done, 1, 2, -1));
    CHECK(done[0].result == 4);
    return NULL;
}

/* Until the waiter sleeps, which it does only in the wait. */
static void await_sleep(void) {
    char path[64], state = 0;
    while (atomic_load(&waiting) == 0)
        usleep(100);
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)atomic_load(&waiting));
    while (state != 'S') {
        FILE *stat = fopen(path, "r");
        CHECK(stat && fscanf(stat, "%*d (%*[^)]) %c", &state) == 1);
        fclose(stat);
        usleep(100);
    }
}

static void destroying(void) {
    struct millpond_file file = open_file(engine, "waited", O_RDWR | O_CREAT);
    struct millpond_request request;
    char bytes[4] = "abc";
    pthread_t thread;

    RETURNS(0, millpond_queue_create(engine, 2, &queue));
    CHECK(pthread_create(&thread, NULL, waiter, NULL) == 0);
    await_sleep();
    memset(&request, 0, sizeof request);
    request.op = MILLPOND_OP_WRITE;
    request.file = file;
    request.memory = bytes;
    request.len = 4;
    RETURNS(-EBUSY, millpond_queue_destroy(queue));
    RETURNS(1, millpond_queue_submit(queue, &request, 1));
    CHECK(pthread_join(thread, NULL) == 0);
    RETURNS(0, millpond_queue_destroy(queue));
    RETURNS(0, millpond_close(file));
}

int main(int argc, char **argv) {
    if (argc > 1)
        rounds = atoi(argv[1]);
    engine = new_engine();
    closing();
    destroying();
    RETURNS(0, millpond_engine_destroy(engine));
    return 0;
}
