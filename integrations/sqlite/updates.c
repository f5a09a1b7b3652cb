/* Updates rows, each in a transaction of its own:
 *
 *   updates URI -ROWS           creates the database, with rows of 200 bytes
 *   updates URI COUNT           updates them by their number, in random order; prints elapsed seconds and processor seconds
 *   updates URI sequence [SQL]  runs SQL and updates rows of a page each in a known order until it is killed; prints the number
 *                               of each committed update
 *   updates URI check           checks such a database; prints the number of its last update, or fails if a row is damaged, has
 *                               another version than that update left, or the database is malformed
 *
 * SQLite, with SQLITE_ENABLE_ATOMIC_WRITE, and the VFS "millpond" are linked in. */
#include "millponddb.h"

#include <sqlite3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Of a sequence. An update and a stride that has no common factor with their number select a row. */
#define ROWS 64
#define STRIDE 37
/* The first update: all numbers of updates are stored in the same size, so a row stays in its page. */
#define FIRST 1000000
/* With its record's header, a row of a sequence fills most of a page. */
#define DATA_BYTES 3900

static sqlite3 *db;

static void check(int rc) {
    if (rc != SQLITE_OK && rc != SQLITE_ROW && rc != SQLITE_DONE) {
        fprintf(stderr, "updates: %s\n", db == NULL ? sqlite3_errstr(rc) : sqlite3_errmsg(db));
        exit(1);
    }
}

static void fail(const char *message, int64_t number) {
    fprintf(stderr, "updates: %s: %lld\n", message, (long long)number);
    exit(1);
}

static void run(const char *sql) {
    check(sqlite3_exec(db, sql, NULL, NULL, NULL));
}

static void log_to_stderr(void *unused, int code, const char *message) {
    (void)unused;
    fprintf(stderr, "updates: %d, %s\n", code, message);
}

static double seconds_by(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static sqlite3_stmt *prepare(const char *sql) {
    sqlite3_stmt *made;
    check(sqlite3_prepare_v2(db, sql, -1, &made, NULL));
    return made;
}

static int64_t number_of(const char *sql) {
    sqlite3_stmt *query = prepare(sql);
    check(sqlite3_step(query));
    int64_t found = sqlite3_column_int64(query, 0);
    sqlite3_finalize(query);
    return found;
}

static void make(long rows) {
    char sql[300];
    snprintf(sql, sizeof sql, "pragma page_size = 4096; create table t(id integer primary key, n integer, data blob); "
        "with recursive r(x) as (select 1 union all select x + 1 from r where x < %ld) "
        "insert into t select x, 0, randomblob(200) from r", rows);
    run(sql);
}

static void update_randomly(long count) {
    uint64_t random = 1;
    int64_t rows = number_of("select count(*) from t"), before = number_of("select sum(n) from t");
    sqlite3_stmt *update = prepare("update t set n = n + 1 where id = ?");
    double from = seconds_by(CLOCK_MONOTONIC), cpu_from = seconds_by(CLOCK_PROCESS_CPUTIME_ID);
    for (long i = 0; i < count; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        sqlite3_bind_int64(update, 1, (int64_t)((random >> 33) % (uint64_t)rows) + 1);
        check(sqlite3_step(update));
        check(sqlite3_reset(update));
    }
    printf("%.4f %.4f\n", seconds_by(CLOCK_MONOTONIC) - from, seconds_by(CLOCK_PROCESS_CPUTIME_ID) - cpu_from);
    sqlite3_finalize(update);
    if (number_of("select sum(n) from t") != before + count)
        fail("the table lacks updates of", count);
}

static int64_t row_of(int64_t number) {
    return number * STRIDE % ROWS;
}

/* The bytes of a row after an update: each is a function of the update's number and of its place. */
static void fill(unsigned char *data, int64_t number) {
    uint64_t random = (uint64_t)number * 2 + 1;
    for (int i = 0; i < DATA_BYTES; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        data[i] = (unsigned char)(random >> 56);
    }
}

static void update_in_order(const char *sql) {
    unsigned char data[DATA_BYTES];
    sqlite3_stmt *update;
    run(sql);
    run("pragma page_size = 4096; begin; create table s(id integer primary key, n integer not null, data blob not null)");
    update = prepare("insert or replace into s values (?, ?, ?)");
    /* The first updates are one transaction, and make the rows. */
    for (int64_t number = FIRST;; number++) {
        fill(data, number);
        sqlite3_bind_int64(update, 1, row_of(number));
        sqlite3_bind_int64(update, 2, number);
        sqlite3_bind_blob(update, 3, data, sizeof data, SQLITE_STATIC);
        check(sqlite3_step(update));
        check(sqlite3_reset(update));
        if (number == FIRST + ROWS - 1) {
            run("commit");
            sqlite3_finalize(update);
            update = prepare("update s set n = ?2, data = ?3 where id = ?1");
        }
        /* The sync of the first single update also covers the removal of the journal before. */
        if (number >= FIRST + ROWS) {
            printf("%lld\n", (long long)number);
            fflush(stdout);
        }
    }
}

static void check_order(void) {
    unsigned char expected[DATA_BYTES];
    sqlite3_stmt *query = prepare("pragma integrity_check");
    check(sqlite3_step(query));
    if (strcmp((const char *)sqlite3_column_text(query, 0), "ok") != 0) {
        fprintf(stderr, "updates: %s\n", (const char *)sqlite3_column_text(query, 0));
        exit(1);
    }
    sqlite3_finalize(query);
    int64_t last = number_of("select max(n) from s");
    if (number_of("select count(*) from s") != ROWS)
        fail("rows are lost before update", last);
    query = prepare("select n, data from s where id = ?");
    for (int64_t number = last; number > last - ROWS; number--) {
        sqlite3_bind_int64(query, 1, row_of(number));
        check(sqlite3_step(query));
        if (sqlite3_column_int64(query, 0) != number)
            fail("a row has another version than that of update", number);
        fill(expected, number);
        if (sqlite3_column_bytes(query, 1) != DATA_BYTES ||
            memcmp(sqlite3_column_blob(query, 1), expected, DATA_BYTES) != 0)
            fail("a row is damaged, of update", number);
        sqlite3_reset(query);
    }
    sqlite3_finalize(query);
    printf("%lld\n", (long long)last);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "updates URI -ROWS|COUNT|sequence [SQL]|check\n");
        return 2;
    }
    if (!sqlite3_compileoption_used("ENABLE_ATOMIC_WRITE")) {
        fprintf(stderr, "updates: SQLite is compiled without SQLITE_ENABLE_ATOMIC_WRITE\n");
        return 2;
    }
    sqlite3_config(SQLITE_CONFIG_LOG, log_to_stderr, NULL);
    check(millponddb_register(0));
    check(sqlite3_open_v2(argv[1], &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_URI, NULL));
    if (strcmp(argv[2], "sequence") == 0)
        update_in_order(argc > 3 ? argv[3] : "");
    else if (strcmp(argv[2], "check") == 0)
        check_order();
    else if (atol(argv[2]) <= 0)
        make(-atol(argv[2]));
    else
        update_randomly(atol(argv[2]));
    return sqlite3_close(db);
}
