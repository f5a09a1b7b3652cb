/* Millpond for SQLite: a VFS, "millpond", for programs that have it linked in. See docs/sqlite.md. */
#ifndef MILLPONDDB_H
#define MILLPONDDB_H

#ifdef __cplusplus
extern "C" {
#endif

/* Registers the VFS "millpond", which lies upon SQLite's "unix"; as the default if `make_default` is not 0.
 * Returns SQLITE_OK, or what sqlite3_vfs_register() said; SQLITE_ERROR where there is no VFS "unix". */
int millponddb_register(int make_default);

/* The same as the default, for SQLITE_EXTRA_INIT. */
int millponddb_extra_init(const char *unused);

#ifdef __cplusplus
}
#endif
#endif
