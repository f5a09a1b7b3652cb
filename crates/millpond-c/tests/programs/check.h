/* Macros and functions that the test programs share. */
#include <errno.h>
#include <fcntl.h>
#include <millpond.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                          \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/* Checks the result of a call, and prints its error text if it differs. */
#define RETURNS(expected, call)                                                                              \
    do {                                                                                                     \
        long long returned_ = (long long)(call);                                                             \
        if (returned_ != (long long)(expected)) {                                                            \
            char why_[256];                                                                                  \
            millpond_error_text(why_, sizeof why_);                                                          \
            fprintf(stderr, "%s:%d: %s: returned %lld, not %lld: %s\n", __FILE__, __LINE__, #call,            \
                    returned_, (long long)(expected), why_);                                                 \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

static inline struct millpond_open_options open_options(int flags) {
    struct millpond_open_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.flags = (uint32_t)flags;
    return options;
}

static inline struct millpond_engine new_engine(void) {
    struct millpond_engine_options options;
    struct millpond_engine engine;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.cache_bytes = 4 << 20;
    RETURNS(0, millpond_engine_create(&options, &engine));
    return engine;
}

static inline struct millpond_file open_file(struct millpond_engine engine, const char *path, int flags) {
    struct millpond_open_options options = open_options(flags);
    struct millpond_file file;
    RETURNS(0, millpond_open(engine, path, &options, &file));
    return file;
}

static inline struct millpond_request request(uint32_t op, struct millpond_file file, void *at, size_t len,
                                       uint64_t offset) {
    static uint64_t number = 0;
    struct millpond_request one;
    memset(&one, 0, sizeof one);
    one.op = op;
    one.file = file;
    one.memory = at;
    one.len = len;
    one.offset = offset;
    one.user_data = ++number;
    return one;
}
