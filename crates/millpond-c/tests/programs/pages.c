/* Rules of integrations/sqlite/pages.h that need other processes at exact moments. The test simulates those as
 * writers of the file and of the wal-index; the connection is a few calls. Run in an empty directory. */
#define _GNU_SOURCE
#include <sys/stat.h>

/* Simulated times of the file: a file system's clock may be coarser than the duration of a test. */
static struct timespec file_time;
static int told_fstat(int fd, struct stat *stat) {
    int error = fstat(fd, stat);
    stat->st_mtim = stat->st_ctim = file_time;
    return error;
}
#define fstat told_fstat
#include "../../../../integrations/sqlite/pages.c"
#undef fstat
#include "../../../../integrations/sqlite/files.c"

#include "check.h"

enum { PAGE = 4096 };

static struct holder holder;
static uint32_t *shared_index;
static int file_of_others;

static bool same(void *file) {
    (void)file;
    return true;
}

/* Another process writes page 1, one byte of it. */
static void others_write(char byte) {
    CHECK(pwrite(file_of_others, &byte, 1, PAGE) == 1);
}

/* The byte of page 1 that a connection reads: from the cache, or else from the kernel. */
static char seen(void) {
    char page[PAGE];
    if (!pages_read(&holder, page, PAGE, PAGE))
        CHECK(pread(file_of_others, page, PAGE, PAGE) == PAGE);
    return page[0];
}

static bool is_served(void) {
    char page[PAGE];
    return pages_read(&holder, page, PAGE, PAGE);
}

/* Sets both copies of the wal-index header. */
static void set_index(uint32_t salt, uint32_t frames, uint32_t backfilled) {
    for (int copy = 0; copy <= INDEX_COPY; copy += INDEX_COPY) {
        shared_index[copy + INDEX_VERSION] = INDEX_VERSION_KNOWN;
        shared_index[copy + INDEX_FRAMES] = frames;
        shared_index[copy + INDEX_SALTS] = shared_index[copy + INDEX_SALTS + 1] = salt;
    }
    shared_index[INDEX_BACKFILLED] = backfilled;
}

/* A database with 'a' in page 1, and a connection. `version`: 1 for a rollback journal, 2 for WAL. */
static void begin(char version) {
    char bytes[2 * PAGE];
    memset(bytes, 'a', sizeof bytes);
    bytes[VERSIONS_AT] = bytes[VERSIONS_AT + 1] = version;
    file_of_others = open("database", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(pwrite(file_of_others, bytes, sizeof bytes, 0) == sizeof bytes);
    file_time.tv_sec = 1000;
    shared_index = calloc(1, 32768);
    CHECK(pages_open(&holder, "database", true, 1 << 20, 0, same, NULL) == 0 && holder.database != NULL);
}

static void end(void) {
    pages_index_unmapping(&holder);
    pages_unlocking(&holder, PAGES_NONE);
    pages_close(&holder);
    close(file_of_others);
    free(shared_index);
}

/* R4: another process may roll back an uncommitted write, and leave no trace of it. */
static void uncommitted_pages_are_dropped(void) {
    char page[PAGE];
    begin(1);
    pages_locked(&holder, PAGES_SHARED);
    CHECK(seen() == 'a' && is_served());
    pages_locked(&holder, PAGES_EXCLUSIVE);
    memset(page, 'b', PAGE);
    CHECK(pages_write(&holder, page, PAGE, PAGE) == 0);
    pages_unlocking(&holder, PAGES_NONE);
    others_write('a'); /* from the journal; header and length are restored */
    pages_locked(&holder, PAGES_SHARED);
    CHECK(seen() == 'a');
    /* After a commit, pages stay cached. */
    pages_locked(&holder, PAGES_EXCLUSIVE);
    CHECK(pages_write(&holder, page, PAGE, PAGE) == 0);
    file_time.tv_sec++;
    pages_committed(&holder);
    pages_unlocking(&holder, PAGES_NONE);
    unsigned long drops = holder.database->drops;
    pages_locked(&holder, PAGES_SHARED);
    CHECK(seen() == 'b' && holder.database->drops == drops);
    end();
}

/* A connection that has mapped a wal-index of `frames` frames, as many as `backfilled` moved, and reads. */
static void begin_wal(uint32_t salt, uint32_t frames, uint32_t backfilled) {
    begin(2);
    pages_locked(&holder, PAGES_SHARED);
    set_index(salt, frames, backfilled);
    pages_index_mapped(&holder, shared_index);
    pages_index_locked(&holder, PAGES_READ);
    CHECK(seen() == 'a' && is_served());
}

/* W4: a connection that restarts the WAL keeps its pages, if it knew of all backfilled frames. */
static void a_restart_of_ours_keeps_pages(void) {
    begin_wal(1, 4, 4);
    unsigned long drops = holder.database->drops;
    pages_index_locked(&holder, PAGES_WRITE);
    set_index(2, 0, 0);
    pages_index_unlocking(&holder, PAGES_WRITE);
    CHECK(is_served() && seen() == 'a' && holder.database->drops == drops);
    end();

    begin_wal(1, 4, 2);
    others_write('b'); /* another process moves the other frames, */
    set_index(1, 4, 4);
    pages_index_locked(&holder, PAGES_WRITE); /* and the holder does not read the index again */
    set_index(2, 0, 0);
    pages_index_unlocking(&holder, PAGES_WRITE);
    CHECK(seen() == 'b');
    end();

    begin_wal(1, 4, 4);
    pages_index_locked(&holder, PAGES_WRITE); /* without a restart; other processes restart it later, */
    pages_index_unlocking(&holder, PAGES_WRITE);
    others_write('b'); /* move frames of the new WAL, and restart it again */
    set_index(3, 0, 0);
    CHECK(seen() == 'b');
    end();
}

/* W5: a wal-index may come to have salts of 0 again, and the file has changed since. */
static void salts_of_zero_are_compared_with_times(void) {
    begin_wal(0, 0, 0);
    unsigned long drops = holder.database->drops;
    pages_index_locked(&holder, PAGES_READ);
    CHECK(is_served() && holder.database->drops == drops);
    others_write('b');
    file_time.tv_sec = 2000;
    pages_index_locked(&holder, PAGES_READ);
    CHECK(seen() == 'b');
    end();

    begin(2);
    clock_gettime(CLOCK_REALTIME, &file_time); /* the clock may not have ticked since */
    pages_locked(&holder, PAGES_SHARED);
    set_index(0, 0, 0);
    pages_index_mapped(&holder, shared_index);
    CHECK(seen() == 'a');
    others_write('b');
    pages_index_locked(&holder, PAGES_READ);
    CHECK(seen() == 'b');
    end();
}

/* W6: without the wal-index no page is known to be current, unless the lock is EXCLUSIVE. */
static void without_a_wal_index_nothing_is_known(void) {
    begin(2);
    pages_locked(&holder, PAGES_SHARED);
    CHECK(!is_served());
    pages_locked(&holder, PAGES_EXCLUSIVE);
    CHECK(seen() == 'a' && is_served());
    pages_unlocking(&holder, PAGES_SHARED);
    others_write('b');
    CHECK(!is_served() && seen() == 'b');
    pages_locked(&holder, PAGES_EXCLUSIVE);
    CHECK(is_served() && seen() == 'b');
    end();

    begin_wal(1, 4, 2);
    others_write('b');
    set_index(1, 4, 3); /* not read; then the mode is changed */
    pages_index_unmapping(&holder);
    atomic_store(&holder.database->is_wal, false);
    CHECK(seen() == 'b');
    end();

    begin_wal(1, 4, 2);
    pages_index_unmapping(&holder);
    pages_locked(&holder, PAGES_EXCLUSIVE);
    CHECK(seen() == 'a' && is_served());
    pages_unlocking(&holder, PAGES_SHARED);
    others_write('b');
    pages_index_mapped(&holder, shared_index); /* recreated by another process, with the same content */
    CHECK(seen() == 'b');
    end();
}

int main(void) {
    uncommitted_pages_are_dropped();
    a_restart_of_ours_keeps_pages();
    salts_of_zero_are_compared_with_times();
    without_a_wal_index_nothing_is_known();
    return 0;
}
