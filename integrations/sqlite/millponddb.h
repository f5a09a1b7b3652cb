/* Millpond for SQLite: the VFS "millpond", for programs that link it in. See docs/sqlite.md. */
#ifndef MILLPONDDB_H
#define MILLPONDDB_H

#ifdef __cplusplus
extern "C" {
#endif

/* Registers the VFS "millpond", which uses SQLite's "unix"; as the default if `make_default` is not 0.
 * Returns SQLITE_OK, or an error of sqlite3_vfs_register(); SQLITE_ERROR if there is no VFS "unix". */
int millponddb_register(int make_default);

/* The same as the default, for SQLITE_EXTRA_INIT. */
int millponddb_extra_init(const char *unused);

#ifdef __cplusplus
}
#endif
#endif
