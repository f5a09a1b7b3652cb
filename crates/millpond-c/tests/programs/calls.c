/* Every function, with good and with bad arguments. Run in an empty directory. */
#define _GNU_SOURCE
#include "check.h"

#include <poll.h>
#include <sys/wait.h>

static struct millpond_engine engine;
static char memory[8192], pattern[8192];

static void engines(void) {
    struct millpond_engine_options options, longer[2];
    struct millpond_engine other, none = {0};
    struct millpond_stats stats;
    char text[256], small[4];

    CHECK(strcmp(millpond_version(), MILLPOND_VERSION) == 0);
    RETURNS(0, millpond_engine_create(NULL, &other));
    RETURNS(0, millpond_engine_destroy(other));
    RETURNS(-EBADF, millpond_engine_destroy(other));
    RETURNS(-EBADF, millpond_engine_destroy(none));
    RETURNS(-EFAULT, millpond_engine_create(NULL, NULL));

    memset(&options, 0, sizeof options);
    RETURNS(-EINVAL, millpond_engine_create(&options, &other)); /* no size */
    options.size = sizeof options;
    options.cache_bytes = 1;
    RETURNS(-EINVAL, millpond_engine_create(&options, &other));
    CHECK(millpond_error_text(text, sizeof text) > 0 && strstr(text, "cache of 1 bytes"));
    CHECK(millpond_error_text(small, sizeof small) == (int)strlen(text) && strlen(small) == 3);
    CHECK(millpond_error_text(NULL, 0) == (int)strlen(text));
    RETURNS(-EFAULT, millpond_error_text(NULL, 1));
    options.cache_bytes = 1 << 20;
    options.backend = 99;
    RETURNS(-EINVAL, millpond_engine_create(&options, &other));
    options.backend = MILLPOND_BACKEND_THREADS;
    options.flags = 1u << 31;
    RETURNS(-EINVAL, millpond_engine_create(&options, &other));
    options.flags = MILLPOND_ENGINE_NO_HIT_PATH | MILLPOND_ENGINE_NO_READAHEAD;
    options.keeper = "/no/such/keeper";
    CHECK(millpond_engine_create(&options, &other) < 0);
    options.keeper = NULL;
    options.dirty_bytes_max = 1 << 16;
    options.dirty_age_max_ms = 100;
    options.reads_in_flight_max = 8;
    RETURNS(0, millpond_engine_create(&options, &other));
    RETURNS(1 << 20, millpond_engine_cache_bytes(other));
    RETURNS(0, millpond_engine_set_hit_path(other, 1));
    RETURNS(0, millpond_engine_leave_keeper(other));
    RETURNS(0, millpond_engine_has_lost_keeper(other));
    CHECK(millpond_engine_back_end(other, text, sizeof text) > 0 && strncmp(text, "threads", 7) == 0);
    CHECK(millpond_engine_dump(other, text, sizeof text) > 0 && strstr(text, "0 operations wait"));
    RETURNS(-EFAULT, millpond_engine_dump(other, NULL, 1));

    memset(&stats, 0, sizeof stats);
    RETURNS(-EINVAL, millpond_engine_stats(other, &stats));
    stats.size = sizeof stats;
    RETURNS(0, millpond_engine_stats(other, &stats));
    CHECK(stats.memory_bytes > 0 && stats.size == sizeof stats);
    RETURNS(-EFAULT, millpond_engine_stats(other, NULL));
    RETURNS(0, millpond_engine_destroy(other));
    RETURNS(-EBADF, millpond_engine_stats(other, &stats));
    RETURNS(-EBADF, millpond_engine_cache_bytes(other));
    RETURNS(-EBADF, millpond_engine_set_hit_path(other, 1));
    RETURNS(-EBADF, millpond_engine_leave_keeper(other));
    RETURNS(-EBADF, millpond_engine_has_lost_keeper(other));
    RETURNS(-EBADF, millpond_engine_back_end(other, text, sizeof text));
    RETURNS(-EBADF, millpond_engine_dump(other, text, sizeof text));

    /* A newer program, without and with a new option. */
    memset(longer, 0, sizeof longer);
    longer[0].size = sizeof longer;
    longer[0].cache_bytes = 1 << 20;
    RETURNS(0, millpond_engine_create(longer, &other));
    RETURNS(0, millpond_engine_destroy(other));
    longer[1].flags = 1;
    RETURNS(-E2BIG, millpond_engine_create(longer, &other));
}

/* Files with untorn blocks: where the file system has none, an open says so. */
static void untorn(void) {
    struct millpond_open_options options = open_options(O_RDWR | O_CREAT);
    struct millpond_file file, none = {0};
    char text[512];
    int64_t bytes_max;

    RETURNS(-EBADF, millpond_untorn_bytes_max(none));
    RETURNS(0, millpond_open(engine, "untorn", &options, &file));
    bytes_max = millpond_untorn_bytes_max(file);
    CHECK(bytes_max == 0 || (bytes_max >= 4096 && bytes_max <= 65536));
    RETURNS(0, millpond_close(file));
    options.untorn_bytes = 5000;
    RETURNS(-EINVAL, millpond_open(engine, "untorn", &options, &file));
    options.untorn_bytes = 4096; /* not with buffered backing */
    RETURNS(-EOPNOTSUPP, millpond_open(engine, "untorn", &options, &file));
    millpond_error_text(text, sizeof text);
    CHECK(strstr(text, "O_DIRECT") != NULL);
    options.backing = MILLPOND_BACKING_DIRECT;
    RETURNS(bytes_max == 0 ? -EOPNOTSUPP : 0, millpond_open(engine, "untorn", &options, &file));
    if (bytes_max == 0)
        return;
    RETURNS(4096, millpond_write(file, memory, 4096, 0));
    RETURNS(-EINVAL, millpond_write(file, memory, 100, 4096));
    RETURNS(0, millpond_close(file));
}

static void opening(void) {
    struct millpond_open_options options;
    struct millpond_file file, again, none = {0}, foreign;
    int fd;

    options = open_options(O_RDWR | O_CREAT | O_EXCL);
    options.mode = 0600;
    RETURNS(0, millpond_open(engine, "opened", &options, &file));
    RETURNS(-EEXIST, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDONLY | O_CREAT | O_EXCL);
    RETURNS(0, millpond_open(engine, "created for reading", &options, &again));
    RETURNS(0, millpond_len(again));
    RETURNS(-EBADF, millpond_write(again, "x", 1, 0));
    RETURNS(0, millpond_close(again));
    RETURNS(-EEXIST, millpond_open(engine, "created for reading", &options, &again));
    options = open_options(O_RDONLY | O_CREAT);
    RETURNS(0, millpond_open(engine, "created for reading", &options, &again));
    RETURNS(0, millpond_close(again));
    options = open_options(O_RDONLY | O_TRUNC);
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    RETURNS(0, millpond_open(engine, "opened", NULL, &again)); /* for reading */
    RETURNS(-EBADF, millpond_write(again, "x", 1, 0));
    RETURNS(0, millpond_close(again));
    RETURNS(-EBADF, millpond_close(again));
    RETURNS(-EBADF, millpond_read(again, memory, 1, 0));
    RETURNS(-EBADF, millpond_close(none));
    foreign.id = engine.id;
    RETURNS(-EBADF, millpond_len(foreign));
    RETURNS(-EBADF, millpond_close(foreign));
    foreign.id = UINT64_MAX;
    RETURNS(-EBADF, millpond_len(foreign));
    for (int bit = 0; bit < 64; bit++) { /* near misses */
        foreign.id = file.id ^ ((uint64_t)1 << bit);
        RETURNS(-EBADF, millpond_len(foreign));
    }
    /* The table's place is reused, the handle is not. */
    CHECK(open_file(engine, "opened", O_RDONLY).id != again.id);

    RETURNS(-EFAULT, millpond_open(engine, NULL, NULL, &again));
    RETURNS(-EFAULT, millpond_open(engine, "opened", NULL, NULL));
    RETURNS(-ENOENT, millpond_open(engine, "missing", NULL, &again));
    RETURNS(-EISDIR, millpond_open(engine, ".", NULL, &again));
    RETURNS(-ENOTSUP, millpond_open(engine, "/dev/null", NULL, &again));
    options = open_options(O_RDWR | O_EXCL);
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDWR | O_DIRECTORY);
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDONLY);
    options.write_mode = 9;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDONLY);
    options.backing = 9;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDONLY);
    options.extra = 9;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options = open_options(O_RDONLY);
    options.page_bytes = 5000;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    options.size = 3;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));
    /* An older program, whose struct ends before `untorn_bytes`. */
    options = open_options(O_RDONLY);
    options.size = offsetof(struct millpond_open_options, untorn_bytes);
    options.untorn_bytes = 3;
    RETURNS(0, millpond_open(engine, "opened", &options, &again));
    RETURNS(0, millpond_close(again));
    options = open_options(O_RDONLY);
    options.reserved = 1;
    RETURNS(-EINVAL, millpond_open(engine, "opened", &options, &again));

    fd = open("opened", O_RDONLY);
    RETURNS(0, millpond_open_descriptor(engine, fd, NULL, &again));
    CHECK(close(fd) == 0); /* the caller's descriptor stays open */
    RETURNS(0, millpond_len(again));
    RETURNS(0, millpond_close(again));
    RETURNS(-EBADF, millpond_open_descriptor(engine, fd, NULL, &again));
    RETURNS(-EBADF, millpond_open_descriptor(engine, -1, NULL, &again));
    fd = open("opened", O_RDONLY);
    options = open_options(O_RDWR);
    RETURNS(-EINVAL, millpond_open_descriptor(engine, fd, &options, &again));
    RETURNS(-EFAULT, millpond_open_descriptor(engine, fd, NULL, NULL));
    close(fd);
    RETURNS(0, millpond_close(file));
}

static void reading_and_writing(void) {
    struct millpond_file file = open_file(engine, "data", O_RDWR | O_CREAT);
    struct millpond_file writer = open_file(engine, "data", O_WRONLY);
    struct iovec parts[3];
    uint64_t at = 99;

    RETURNS(6000, millpond_write(file, pattern, 6000, 0));
    RETURNS(6000, millpond_len(file));
    RETURNS(-EAGAIN, (millpond_advise(file, 0, 0, MILLPOND_ADVICE_DONT_NEED),
                      millpond_try_read(file, memory, 100, 5000)));
    RETURNS(1000, millpond_read(file, memory, 5000, 5000)); /* to its end */
    CHECK(memcmp(memory, pattern + 5000, 1000) == 0);
    RETURNS(100, millpond_try_read(file, memory, 100, 5000));
    RETURNS(0, millpond_try_read(file, memory, 0, 5000));
    RETURNS(0, millpond_read(file, memory, 1, 6000));
    RETURNS(0, millpond_read(file, NULL, 0, 0));
    RETURNS(-EFAULT, millpond_read(file, NULL, 1, 0));
    RETURNS(-EFAULT, millpond_try_read(file, NULL, 1, 0));
    RETURNS(-EFAULT, millpond_write(file, NULL, 1, 0));
    RETURNS(-EINVAL, millpond_read(file, memory, 1, UINT64_MAX));
    RETURNS(-EINVAL, millpond_try_read(file, memory, 2, INT64_MAX));
    RETURNS(-EINVAL, millpond_write(file, memory, SIZE_MAX, 1));
    RETURNS(-EBADF, millpond_read(writer, memory, 1, 0));
    RETURNS(-EBADF, millpond_try_read(writer, memory, 1, 0));

    parts[0].iov_base = memory, parts[0].iov_len = 10;
    parts[1].iov_base = NULL, parts[1].iov_len = 0;
    parts[2].iov_base = memory + 100, parts[2].iov_len = 20;
    RETURNS(30, millpond_readv(file, parts, 3, 1));
    CHECK(memcmp(memory, pattern + 1, 10) == 0 && memcmp(memory + 100, pattern + 11, 20) == 0);
    RETURNS(30, millpond_writev(file, parts, 3, 3000));
    RETURNS(0, millpond_readv(file, NULL, 0, 0));
    RETURNS(-EINVAL, millpond_readv(file, parts, -1, 0));
    RETURNS(-EFAULT, millpond_readv(file, NULL, 1, 0));
    RETURNS(-EINVAL, millpond_writev(file, parts, -1, 0));
    RETURNS(-EFAULT, millpond_writev(file, NULL, 1, 0));
    parts[1].iov_len = 1;
    RETURNS(-EFAULT, millpond_readv(file, parts, 3, 0));
    RETURNS(-EFAULT, millpond_writev(file, parts, 3, 0));
    RETURNS(-EFAULT, millpond_appendv(file, parts, 3, &at));
    parts[1].iov_len = 0;

    RETURNS(3, millpond_append(writer, "end", 3, &at));
    CHECK(at == 6000);
    RETURNS(1, millpond_append(writer, ".", 1, NULL));
    RETURNS(-EFAULT, millpond_append(writer, NULL, 1, NULL));
    RETURNS(30, millpond_appendv(writer, parts, 3, &at));
    CHECK(at == 6004);
    RETURNS(4, millpond_read(file, memory, 4, 6000));
    CHECK(memcmp(memory, "end.", 4) == 0);

    for (uint32_t advice = MILLPOND_ADVICE_NORMAL; advice <= MILLPOND_ADVICE_ATOMIC_READS; advice++)
        RETURNS(0, millpond_advise(file, 0, 4096, advice));
    RETURNS(-EINVAL, millpond_advise(file, 0, 0, 99));
    RETURNS(-EINVAL, millpond_advise(file, UINT64_MAX, 2, MILLPOND_ADVICE_NORMAL));
    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_close(writer));
    RETURNS(-EBADF, millpond_readv(file, parts, 3, 0));
    RETURNS(-EBADF, millpond_try_read(file, memory, 1, 0));
    RETURNS(-EBADF, millpond_write(file, memory, 1, 0));
    RETURNS(-EBADF, millpond_writev(file, parts, 3, 0));
    RETURNS(-EBADF, millpond_append(file, memory, 1, NULL));
    RETURNS(-EBADF, millpond_appendv(file, parts, 3, NULL));
    RETURNS(-EBADF, millpond_advise(file, 0, 0, 0));
}

static void extents(void) {
    struct millpond_file file = open_file(engine, "extents", O_RDWR | O_CREAT);
    struct millpond_file reader = open_file(engine, "extents", O_RDONLY);
    int fd, error;

    for (int i = 0; i < 32; i++)
        RETURNS(8192, millpond_write(file, pattern, 8192, (uint64_t)i * 8192));
    error = millpond_punch_hole(file, 65536, 65536);
    CHECK(error == 0 || error == -EOPNOTSUPP);
    if (error == 0) {
        RETURNS(1, millpond_read(file, memory, 1, 65537));
        CHECK(memory[0] == 0);
        CHECK(millpond_seek_hole(file, 0) >= 65536);
    }
    RETURNS(0, millpond_seek_data(file, 0));
    RETURNS(-ENXIO, millpond_seek_data(file, 1 << 20));
    RETURNS(-ENXIO, millpond_seek_hole(file, 1 << 20));
    RETURNS(-EINVAL, millpond_seek_data(file, UINT64_MAX));
    RETURNS(-EINVAL, millpond_seek_hole(file, UINT64_MAX));
    RETURNS(0, millpond_zero_range(file, 1, 4096));
    RETURNS(2, millpond_read(file, memory, 2, 0));
    CHECK(memory[0] == pattern[0] && memory[1] == 0);
    error = millpond_allocate(file, 0, 300000);
    CHECK(error == -EOPNOTSUPP || (error == 0 && millpond_len(file) == 300000));
    RETURNS(0, millpond_truncate(file, 100));
    RETURNS(100, millpond_len(file));
    RETURNS(-EINVAL, millpond_truncate(file, UINT64_MAX));
    RETURNS(-EINVAL, millpond_punch_hole(file, 0, 0));
    RETURNS(-EINVAL, millpond_zero_range(file, 0, 0));
    RETURNS(-EINVAL, millpond_allocate(file, 1, INT64_MAX));
    RETURNS(-EBADF, millpond_truncate(reader, 0));
    RETURNS(-EBADF, millpond_punch_hole(reader, 0, 1));
    RETURNS(-EBADF, millpond_zero_range(reader, 0, 1));
    RETURNS(-EBADF, millpond_allocate(reader, 0, 1));

    fd = open("extents", O_WRONLY | O_APPEND);
    CHECK(write(fd, "behind its back", 15) == 15 && close(fd) == 0);
    RETURNS(0, millpond_invalidate(file, 0, 4096));
    RETURNS(115, millpond_len(file));
    RETURNS(-EINVAL, millpond_invalidate(file, UINT64_MAX, 1));

    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_close(reader));
    RETURNS(-EBADF, millpond_truncate(file, 0));
    RETURNS(-EBADF, millpond_punch_hole(file, 0, 1));
    RETURNS(-EBADF, millpond_zero_range(file, 0, 1));
    RETURNS(-EBADF, millpond_allocate(file, 0, 1));
    RETURNS(-EBADF, millpond_seek_data(file, 0));
    RETURNS(-EBADF, millpond_seek_hole(file, 0));
    RETURNS(-EBADF, millpond_invalidate(file, 0, 0));
}

static void durability(void) {
    struct millpond_open_options options = open_options(O_RDWR | O_CREAT);
    struct millpond_file file, other;
    char kernels[4];
    int fd;

    options.write_mode = MILLPOND_WRITE_BACK;
    RETURNS(0, millpond_open(engine, "late.new", &options, &file));
    RETURNS(4, millpond_write(file, "late", 4, 0));
    fd = open("late.new", O_RDONLY);
    RETURNS(0, millpond_write_back(file));
    CHECK(pread(fd, kernels, 4, 0) == 4 && memcmp(kernels, "late", 4) == 0);
    close(fd);
    RETURNS(0, millpond_sync(file));
    RETURNS(0, millpond_sync_data(file));
    RETURNS(0, millpond_sync_range(file, 0, 4));
    RETURNS(-EINVAL, millpond_sync_range(file, UINT64_MAX, 4));
    RETURNS(0, millpond_persist(file, "late.new", "late", 0));
    CHECK(access("late", F_OK) == 0 && access("late.new", F_OK) != 0);
    other = open_file(engine, "late.new", O_RDWR | O_CREAT);
    RETURNS(-EEXIST, millpond_persist(other, "late.new", "late", MILLPOND_PERSIST_NOCLOBBER));
    RETURNS(-EINVAL, millpond_persist(other, "late.new", "late", 8));
    RETURNS(-EINVAL, millpond_persist(other, "late", "later", 0)); /* another file's name */
    RETURNS(-EFAULT, millpond_persist(other, NULL, "late", 0));
    RETURNS(-EFAULT, millpond_persist(other, "late", NULL, 0));
    RETURNS(0, millpond_close(other));
    RETURNS(0, millpond_close(file));
    RETURNS(-EBADF, millpond_write_back(file));
    RETURNS(-EBADF, millpond_sync(file));
    RETURNS(-EBADF, millpond_sync_data(file));
    RETURNS(-EBADF, millpond_sync_range(file, 0, 0));
    RETURNS(-EBADF, millpond_persist(file, "late", "late", 0));
}

static void views(void) {
    struct millpond_file file = open_file(engine, "viewed", O_RDWR | O_CREAT);
    struct millpond_view view, copy, none = {0};

    RETURNS(6, millpond_write(file, "before", 6, 0));
    RETURNS(0, millpond_view_take(file, 0, 100, &view));
    RETURNS(6, millpond_write(file, "after ", 6, 0));
    RETURNS(0, millpond_close(file));
    CHECK(view.len == 6 && memcmp(view.data, "before", 6) == 0);
    copy = view;
    RETURNS(0, millpond_view_release(&view));
    CHECK(view.data == NULL && view.len == 0 && view.id == 0);
    RETURNS(-EBADF, millpond_view_release(&view));
    RETURNS(-EBADF, millpond_view_release(&copy));
    RETURNS(-EBADF, millpond_view_release(&none));
    RETURNS(-EFAULT, millpond_view_release(NULL));
    RETURNS(-EBADF, millpond_view_take(file, 0, 1, &view));
    file = open_file(engine, "viewed", O_RDONLY);
    RETURNS(-EFAULT, millpond_view_take(file, 0, 1, NULL));
    RETURNS(-EINVAL, millpond_view_take(file, UINT64_MAX, 2, &view));
    RETURNS(0, millpond_view_take(file, 6, 1, &view)); /* the end */
    CHECK(view.len == 0);
    RETURNS(0, millpond_view_release(&view));
    RETURNS(0, millpond_close(file));
}

static void queues(void) {
    struct millpond_file file = open_file(engine, "queued", O_RDWR | O_CREAT);
    struct millpond_queue queue, none = {0};
    struct millpond_request requests[9];
    struct millpond_completion done[8];
    const int64_t moment_ns = 1000000;
    struct iovec parts[2];
    struct pollfd poller;
    size_t ready, in_flight;

    RETURNS(-EBADF, millpond_queue_create((struct millpond_engine){0}, 8, &queue));
    RETURNS(-EFAULT, millpond_queue_create(engine, 8, NULL));
    RETURNS(-EINVAL, millpond_queue_create(engine, 0, &queue));
    RETURNS(0, millpond_queue_create(engine, 8, &queue));
    poller.fd = millpond_queue_eventfd(queue);
    poller.events = POLLIN;
    CHECK(poller.fd >= 0 && poll(&poller, 1, 0) == 0);

    parts[0].iov_base = pattern, parts[0].iov_len = 3000;
    parts[1].iov_base = pattern + 3000, parts[1].iov_len = 1096;
    requests[0] = request(MILLPOND_OP_WRITEV, file, parts, 2, 0);
    requests[1] = request(MILLPOND_OP_WRITE, file, pattern + 4096, 4096, 4096);
    RETURNS(2, millpond_queue_submit(queue, requests, 2));
    memset(parts, 0, sizeof parts); /* the array may be reused */
    RETURNS(2, millpond_queue_wait(queue, done, 2, 8, -1));
    CHECK(done[0].result == 4096 && done[1].result == 4096);
    CHECK(done[0].user_data + done[1].user_data == requests[0].user_data + requests[1].user_data);

    /* Not cached, cached, and syncs. */
    RETURNS(0, millpond_advise(file, 0, 0, MILLPOND_ADVICE_DONT_NEED));
    memset(memory, 0, sizeof memory);
    requests[0] = request(MILLPOND_OP_READ, file, memory, 4096, 0);
    parts[0].iov_base = memory + 4096, parts[0].iov_len = 96;
    parts[1].iov_base = memory + 4192, parts[1].iov_len = 4000;
    requests[1] = request(MILLPOND_OP_READV, file, parts, 2, 4096);
    requests[2] = request(MILLPOND_OP_SYNC, file, NULL, 0, 0);
    requests[3] = request(MILLPOND_OP_SYNC_DATA, file, NULL, 0, 0);
    RETURNS(4, millpond_queue_submit(queue, requests, 4));
    RETURNS(4, millpond_queue_wait_at_least(queue, done, 4, 4, UINT64_MAX, -1));
    for (int i = 0; i < 4; i++)
        CHECK(done[i].result == 4096 || done[i].result == 0);
    CHECK(memcmp(memory, pattern, 8192) == 0);
    for (int i = 0; i < 8; i++)
        requests[i] = request(MILLPOND_OP_READ, file, memory + i, 1, (uint64_t)i);
    RETURNS(8, millpond_queue_submit(queue, requests, 9)); /* no room for the last */
    RETURNS(-EAGAIN, millpond_queue_submit(queue, requests, 1));
    CHECK(poll(&poller, 1, 0) == 1);
    RETURNS(0, millpond_queue_counts(queue, &ready, &in_flight));
    CHECK(ready == 8 && in_flight == 0);
    RETURNS(0, millpond_queue_counts(queue, NULL, NULL));
    RETURNS(8, millpond_queue_wait(queue, done, 0, 8, -1));
    RETURNS(0, millpond_queue_wait(queue, done, 0, 8, -1));
    RETURNS(0, millpond_queue_wait(queue, done, 1, 8, moment_ns));
    RETURNS(0, millpond_queue_wait_at_least(queue, done, 8, 8, 0, moment_ns));

    /* Refused requests, and errors in completions. */
    RETURNS(0, millpond_queue_submit(queue, requests, 0));
    RETURNS(-EFAULT, millpond_queue_submit(queue, NULL, 1));
    requests[1].op = 99;
    RETURNS(1, millpond_queue_submit(queue, requests, 3)); /* up to the bad one */
    RETURNS(1, millpond_queue_wait(queue, done, 1, 8, -1));
    RETURNS(-EINVAL, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_READ, file, NULL, 1, 0);
    RETURNS(-EFAULT, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_READ, (struct millpond_file){7}, memory, 1, 0);
    RETURNS(-EBADF, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_SYNC, file, memory, 1, 0);
    RETURNS(-EINVAL, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_READV, file, parts, SIZE_MAX, 0);
    RETURNS(-EINVAL, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_READ, file, memory, 1, 0);
    requests[1].reserved[1] = 1;
    RETURNS(-EINVAL, millpond_queue_submit(queue, &requests[1], 1));
    requests[1] = request(MILLPOND_OP_READ, file, memory, 1, UINT64_MAX);
    RETURNS(1, millpond_queue_submit(queue, &requests[1], 1));
    RETURNS(1, millpond_queue_wait(queue, done, 1, 8, -1));
    CHECK(done[0].result == -EINVAL);
    RETURNS(-EINVAL, millpond_queue_wait(queue, done, 9, 9, -1));
    RETURNS(-EINVAL, millpond_queue_wait(queue, done, 2, 1, -1));
    RETURNS(-EINVAL, millpond_queue_wait(queue, done, 0, 0, -1));
    RETURNS(-EFAULT, millpond_queue_wait(queue, NULL, 0, 1, -1));
    RETURNS(-EFAULT, millpond_queue_wait_at_least(queue, NULL, 0, 1, 0, 0));
    RETURNS(-ENOENT, millpond_queue_cancel(queue, 12345));

    /* Requests of a closed file complete; the destruction of a queue waits for its requests. */
    for (int i = 0; i < 8; i++)
        requests[i] = request(MILLPOND_OP_WRITE, file, pattern, 8192, (uint64_t)i * 8192);
    RETURNS(8, millpond_queue_submit(queue, requests, 8));
    RETURNS(0, millpond_close(file));
    RETURNS(0, millpond_queue_destroy(queue));
    memset(pattern, 7, sizeof pattern); /* may be reused */
    file = open_file(engine, "queued", O_RDONLY);
    RETURNS(8 * 8192, millpond_len(file));
    RETURNS(1, millpond_read(file, memory, 1, 8 * 8192 - 1));
    CHECK(memory[0] != 7);
    RETURNS(0, millpond_close(file));
    RETURNS(-EBADF, millpond_queue_destroy(queue));
    RETURNS(-EBADF, millpond_queue_destroy(none));
    RETURNS(-EBADF, millpond_queue_submit(queue, requests, 1));
    RETURNS(-EBADF, millpond_queue_wait(queue, done, 0, 1, -1));
    RETURNS(-EBADF, millpond_queue_wait_at_least(queue, done, 0, 1, 0, 0));
    RETURNS(-EBADF, millpond_queue_cancel(queue, 1));
    RETURNS(-EBADF, millpond_queue_eventfd(queue));
    RETURNS(-EBADF, millpond_queue_counts(queue, NULL, NULL));
}

static void forking(void) {
    struct millpond_file file = open_file(engine, "forked", O_RDWR | O_CREAT);
    struct millpond_queue queue;
    struct millpond_view view;
    int status;
    pid_t child;

    RETURNS(5, millpond_write(file, "known", 5, 0));
    RETURNS(0, millpond_queue_create(engine, 4, &queue));
    RETURNS(0, millpond_view_take(file, 0, 5, &view));
    child = fork();
    if (child == 0) {
        struct millpond_engine own;
        struct millpond_file own_file;
        RETURNS(-EBADF, millpond_read(file, memory, 5, 0));
        RETURNS(-EBADF, millpond_write(file, memory, 5, 0));
        RETURNS(-EBADF, millpond_close(file));
        RETURNS(-EBADF, millpond_queue_destroy(queue));
        RETURNS(-EBADF, millpond_view_release(&view));
        RETURNS(-EBADF, millpond_engine_destroy(engine));
        own = new_engine();
        CHECK(own.id != engine.id);
        own_file = open_file(own, "forked", O_RDWR);
        CHECK(own_file.id != file.id);
        RETURNS(5, millpond_read(own_file, memory, 8, 0));
        RETURNS(5, millpond_write(own_file, "child", 5, 0));
        RETURNS(0, millpond_close(own_file));
        RETURNS(0, millpond_engine_destroy(own));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    RETURNS(0, millpond_view_release(&view));
    RETURNS(0, millpond_invalidate(file, 0, 5));
    RETURNS(5, millpond_read(file, memory, 8, 0));
    CHECK(memcmp(memory, "child", 5) == 0);
    RETURNS(0, millpond_queue_destroy(queue));
    RETURNS(0, millpond_close(file));
}

static void keepers(void) {
    char address[MILLPOND_KEEPER_ADDRESS_BYTES];
    struct millpond_engine_options options;
    struct millpond_engine kept;
    int error;
    memset(&options, 0, sizeof options);
    RETURNS(-ERANGE, millpond_keeper_spawn(address, 10));
    RETURNS(-EFAULT, millpond_keeper_spawn(NULL, 10));
    error = millpond_keeper_spawn(address, sizeof address);
    if (error == -ENOSYS) {
        puts("SKIPPED: no keeper without pidfd_open(2)");
        return;
    }
    RETURNS(0, error);
    options.size = sizeof options;
    options.cache_bytes = 1 << 20;
    options.keeper = address;
    RETURNS(0, millpond_engine_create(&options, &kept));
    RETURNS(0, millpond_engine_has_lost_keeper(kept));
    RETURNS(0, millpond_engine_leave_keeper(kept));
    RETURNS(0, millpond_engine_destroy(kept));
}

int main(void) {
    for (size_t i = 0; i < sizeof pattern; i++)
        pattern[i] = (char)(i * 7 + i / 4096 + 1);
    keepers(); /* before there are threads */
    engine = new_engine();
    engines();
    opening();
    untorn();
    reading_and_writing();
    extents();
    durability();
    views();
    queues();
    forking();
    RETURNS(0, millpond_fault_resume_address(0));
    RETURNS(0, millpond_engine_destroy(engine));
    puts("all calls checked");
    return 0;
}
