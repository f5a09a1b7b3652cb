/* Makes "millpond" the default VFS of SQLite's testfixture if MILLPOND_SUITE is set. */
#include "millponddb.h"

#include <stdlib.h>

int suite_init(const char *unused);

int suite_init(const char *unused) {
    (void)unused;
    return getenv("MILLPOND_SUITE") == NULL ? 0 : millponddb_register(1);
}
