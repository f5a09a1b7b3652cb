// Four connections to one SQLite database, each in a thread of its own: two read rows at random, two
// change some.
//
//   wal DATABASE ROWS READS WRITES
//
// Prints `ops N ns N cpu N` on standard error, and the final contents of the database on standard output.
#include <pthread.h>
#include <sqlite3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *path;
static long rows, reads, writes;
static pthread_barrier_t ready;

// From when the first thread began until the last one was done, and the process's processor time then.
struct span {
    uint64_t from, to, cpu_from, cpu_to;
};
static struct span spans[4];

static void fail(sqlite3 *db, const char *what) {
    fprintf(stderr, "%s: %s\n", what, sqlite3_errmsg(db));
    exit(1);
}

static sqlite3 *connect_to(void) {
    sqlite3 *db;
    if (sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL)) fail(db, "open");
    sqlite3_busy_timeout(db, 60000);
    const char *script = "pragma journal_mode = wal; pragma synchronous = normal;";
    if (sqlite3_exec(db, script, NULL, NULL, NULL)) fail(db, "wal");
    return db;
}

static long next_row(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return 1 + (long)((*state >> 33) % (uint64_t)rows);
}

static uint64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void *work(void *argument) {
    struct span *span = argument;
    long which = span - spans;
    int is_writer = which >= 2;
    uint64_t state = (uint64_t)which + 1;
    sqlite3 *db = connect_to();
    sqlite3_stmt *statement;
    const char *text = is_writer ? "update t set n = n + 1 where id = ?" : "select v from t where id = ?";
    if (sqlite3_prepare_v2(db, text, -1, &statement, NULL)) fail(db, text);
    pthread_barrier_wait(&ready);
    span->from = now(CLOCK_MONOTONIC), span->cpu_from = now(CLOCK_PROCESS_CPUTIME_ID);
    for (long i = 0; i < (is_writer ? writes : reads); i++) {
        long row = next_row(&state);
        sqlite3_bind_int64(statement, 1, row);
        int status = sqlite3_step(statement);
        if (is_writer ? status != SQLITE_DONE : status != SQLITE_ROW) fail(db, text);
        if (!is_writer && atol((const char *)sqlite3_column_text(statement, 0)) != row) {
            fprintf(stderr, "row %ld is another\n", row);
            exit(1);
        }
        sqlite3_reset(statement);
    }
    span->to = now(CLOCK_MONOTONIC), span->cpu_to = now(CLOCK_PROCESS_CPUTIME_ID);
    sqlite3_finalize(statement);
    sqlite3_close(db);
    return NULL;
}

static long sum(sqlite3 *db) {
    sqlite3_stmt *statement;
    if (sqlite3_prepare_v2(db, "select sum(n) from t", -1, &statement, NULL)) fail(db, "sum");
    if (sqlite3_step(statement) != SQLITE_ROW) fail(db, "sum");
    long sum = sqlite3_column_int64(statement, 0);
    sqlite3_finalize(statement);
    return sum;
}

static int tell(void *nothing, int columns, char **values, char **names) {
    (void)nothing, (void)names;
    for (int i = 0; i < columns; i++) puts(values[i]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    path = argv[1], rows = atol(argv[2]), reads = atol(argv[3]), writes = atol(argv[4]);
    sqlite3 *db = connect_to();
    long before = sum(db);
    pthread_barrier_init(&ready, NULL, 4);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, work, &spans[i]);
    struct span all = {UINT64_MAX, 0, UINT64_MAX, 0};
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        if (spans[i].from < all.from) all.from = spans[i].from;
        if (spans[i].to > all.to) all.to = spans[i].to;
        if (spans[i].cpu_from < all.cpu_from) all.cpu_from = spans[i].cpu_from;
        if (spans[i].cpu_to > all.cpu_to) all.cpu_to = spans[i].cpu_to;
    }
    printf("%ld more\n", sum(db) - before);
    if (sqlite3_exec(db, "pragma integrity_check", tell, NULL, NULL)) fail(db, "integrity_check");
    sqlite3_close(db);
    fprintf(stderr, "ops %ld ns %llu cpu %llu\n", 2 * (reads + writes),
            (unsigned long long)(all.to - all.from), (unsigned long long)(all.cpu_to - all.cpu_from));
    return 0;
}
