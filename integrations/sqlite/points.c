/* Reads rows of a database by their number, in random order: points DATABASE ROWS READS each|one [EXTENSION]
 *
 * Each read is a transaction, or all reads are one transaction. With EXTENSION, the VFS "millpond" opens the database. The
 * whole table is read before the clock starts.
 * Prints elapsed seconds and processor seconds. With ROWS of 0 or less, it creates the database, with -ROWS rows of one page
 * each, 4 to 512 MiB. */
#include <sqlite3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

static sqlite3 *db;

static void check(int rc) {
    if (rc != SQLITE_OK && rc != SQLITE_ROW && rc != SQLITE_DONE) {
        fprintf(stderr, "points: %s\n", db == NULL ? sqlite3_errstr(rc) : sqlite3_errmsg(db));
        exit(1);
    }
}

static void run(const char *sql) {
    check(sqlite3_exec(db, sql, NULL, NULL, NULL));
}

static void make(const char *name, long rows) {
    char sql[300];
    check(sqlite3_open(name, &db));
    run("pragma page_size = 4096; pragma journal_mode = off; pragma synchronous = off");
    /* One row in a page. */
    snprintf(sql, sizeof sql, "create table t(id integer primary key, data blob); "
        "with recursive n(x) as (select 1 union all select x + 1 from n where x < %ld) "
        "insert into t select x, randomblob(3900) from n", rows);
    run(sql);
}

static double seconds(struct timespec at) {
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    sqlite3_stmt *read;
    struct timespec from, to;
    struct timespec cpu_from, cpu_to;
    uint64_t random = 1;
    long sum = 0, rows = argc > 2 ? atol(argv[2]) : 0, reads = argc > 3 ? atol(argv[3]) : 0;
    if (argc < 3 || (rows > 0 && argc < 5)) {
        fprintf(stderr, "points DATABASE ROWS READS each|one [EXTENSION]\n");
        return 2;
    }
    if (rows <= 0) {
        make(argv[1], -rows);
        return sqlite3_close(db);
    }
    if (argc > 5) {
        check(sqlite3_open(":memory:", &db));
        sqlite3_enable_load_extension(db, 1);
        check(sqlite3_load_extension(db, argv[5], NULL, NULL));
        sqlite3_close(db);
    }
    check(sqlite3_open_v2(argv[1], &db, SQLITE_OPEN_READWRITE, argc > 5 ? "millpond" : "unix"));
    check(sqlite3_prepare_v2(db, "select sum(length(data)) from t", -1, &read, NULL));
    check(sqlite3_step(read));
    sqlite3_finalize(read);
    if (argv[4][0] == 'o')
        run("begin");
    check(sqlite3_prepare_v2(db, "select length(data), data from t where id = ?", -1, &read, NULL));
    clock_gettime(CLOCK_MONOTONIC, &from);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_from);
    for (long i = 0; i < reads; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        sqlite3_bind_int64(read, 1, (int64_t)((random >> 33) % (uint64_t)rows) + 1);
        check(sqlite3_step(read));
        sum += sqlite3_column_int(read, 0) + ((const char *)sqlite3_column_blob(read, 1))[100];
        sqlite3_reset(read);
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_to);
    printf("%.4f %.4f\n", seconds(to) - seconds(from), seconds(cpu_to) - seconds(cpu_from));
    sqlite3_finalize(read);
    sqlite3_close(db);
    return sum == 0;
}
