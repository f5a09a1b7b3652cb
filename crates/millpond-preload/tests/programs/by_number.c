/* System calls by number, on cached files: the result of each, and the visible state of the file after it. The
 * output must be the same with the library and without it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif

enum { BYTES = 8192 };
static char buf[1 << 16], two[BYTES];
static int fd, other, p[2];

/* The kernel's view, which no hook sees. */
static long raw(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return result;
}

static unsigned hash(const char *bytes, long n)
{
	unsigned h = 5381;
	for (long i = 0; i < n; i++)
		h = h * 33 + (unsigned char)bytes[i];
	return h;
}

static void begin(const char *name)
{
	printf("case %s\n", name);
	unlink("f"), unlink("g"), unlink("h");
	fd = open("f", O_RDWR | O_CREAT, 0644);
	other = open("g", O_RDWR | O_CREAT, 0644);
	memset(two, 'a', BYTES);
	write(fd, two, BYTES);
	memset(two, 'o', BYTES);
	write(other, two, BYTES);
	lseek(fd, 100, SEEK_SET);
	lseek(other, 200, SEEK_SET);
	for (int i = 0; i < 2; i++)
		pread(fd, buf, BYTES, 0), pread(other, buf, BYTES, 0);
	/* In mode back these bytes are in the cache only. */
	pwrite(fd, "WAITS", 5, 4000);
	memset(two, 'b', BYTES);
	memset(buf, '.', sizeof buf);
	errno = 0;
}

static void say(const char *what, long result)
{
	int e = errno;
	printf("  %s = %ld %s\n", what, result, result < 0 ? strerror(e) : "");
	errno = 0;
}
#define SAY(call) say(#call, (long)(call))

/* The state of a file by its descriptor and by its path, through the hooks and past them. */
static void show(const char *path, int file)
{
	static char all[1 << 16];
	struct stat st = {0};
	long offset = lseek(file, 0, SEEK_CUR), n = pread(file, all, sizeof all, 0);
	printf("  %s: offset %ld, hooked %ld %08x", path, offset, n, n > 0 ? hash(all, n) : 0);
	int failed = fstat(file, &st);
	printf(", size %ld", failed ? -1 : (long)st.st_size);
	long again = raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY, 0);
	n = raw(SYS_pread64, again, (long)all, sizeof all, 0);
	printf(", kernel %ld %08x\n", again < 0 ? again : n, again >= 0 && n > 0 ? hash(all, n) : 0);
	raw(SYS_close, again, 0, 0, 0);
}

static void end(void)
{
	printf("  memory %08x\n", hash(buf, sizeof buf));
	show("f", fd);
	show("g", other);
	close(fd);
	close(other);
}

#define CASE(name, ...) do { begin(#name); __VA_ARGS__; end(); } while (0)

static void transfers(void)
{
	struct iovec v = {two, 3000}, in[2] = {{buf, 50}, {buf + 100, 900}}, bad = {NULL, 10};
	CASE(read, SAY(syscall(SYS_read, fd, buf, 500)); SAY(syscall(SYS_read, fd, buf, 500)));
	CASE(write, SAY(syscall(SYS_write, fd, two, 500)); SAY(syscall(SYS_write, fd, NULL, 10)));
	CASE(pread64, SAY(syscall(SYS_pread64, fd, buf, 500, 3900L)); SAY(syscall(SYS_pread64, fd, buf, 500, -1L)));
	CASE(pwrite64, SAY(syscall(SYS_pwrite64, fd, two, 500, 3900L)));
	CASE(readv, SAY(syscall(SYS_readv, fd, in, 2)); SAY(syscall(SYS_readv, fd, in, 2000L)));
	CASE(writev, SAY(syscall(SYS_writev, fd, &v, 1)); SAY(syscall(SYS_writev, fd, &bad, 1)));
	CASE(preadv, SAY(syscall(SYS_preadv, fd, in, 2, 3990L, 0L)); SAY(syscall(SYS_preadv, fd, in, 1L << 32 | 1, 0L, 0L)));
	CASE(pwritev, SAY(syscall(SYS_pwritev, fd, &v, 1, 3990L, 0L)); SAY(syscall(SYS_pwritev, fd, &v, 1, 20000L, 0L)));
	CASE(preadv2, SAY(syscall(SYS_preadv2, fd, in, 2, -1L, -1L, 0)); SAY(syscall(SYS_preadv2, fd, in, 2, 8000L, 0L, 0)));
	CASE(preadv2, SAY(syscall(SYS_preadv2, fd, in, 2, 3990L, 0L, RWF_HIPRI)));
	CASE(pwritev2, SAY(syscall(SYS_pwritev2, fd, &v, 1, -1L, -1L, 0)); SAY(syscall(SYS_pwritev2, fd, &v, 1, 0L, 0L, RWF_DSYNC)));
	CASE(pwritev2, SAY(syscall(SYS_pwritev2, fd, &v, 1, 0L, 0L, RWF_APPEND)));
	CASE(rt_sigprocmask, long set = 1L << (SIGBUS - 1); SAY(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &set, NULL, 8L));
		SAY(pread(fd, buf, 500, 0)); SAY(syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &set, NULL, 8L)));
}

static void descriptors(void)
{
	int n;
	struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_CUR};
	CASE(dup, SAY(n = syscall(SYS_dup, fd)); SAY(read(n, buf, 10)); SAY(pwrite(n, two, 10, 0)); close(n));
	CASE(dup3, SAY(n = syscall(SYS_dup3, fd, 50, O_CLOEXEC)); SAY(write(n, two, 10)); close(n));
	CASE(close, SAY(syscall(SYS_close, fd)); SAY(read(fd, buf, 10)); pipe(p); SAY(read(fd, buf, 0)); close(p[0]), close(p[1]);
		fd = open("f", O_RDWR));
	CASE(close_range, SAY(syscall(SYS_close_range, fd, fd, 0)); SAY(read(fd, buf, 10)); fd = open("f", O_RDWR));
	CASE(fcntl, SAY(n = syscall(SYS_fcntl, fd, F_DUPFD, 60)); SAY(read(n, buf, 10)); close(n); SAY(syscall(SYS_fcntl, fd, F_SETLK, &l)));
	CASE(fcntl, SAY(syscall(SYS_fcntl, fd, F_SETFL, O_APPEND)); SAY(write(fd, two, 10)); SAY(syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND));
	CASE(lseek, SAY(syscall(SYS_lseek, fd, 7L, SEEK_END)); SAY(write(fd, two, 10)); SAY(syscall(SYS_lseek, fd, 0L, SEEK_HOLE)));
	CASE(flock, SAY(syscall(SYS_flock, fd, LOCK_EX)); n = open("f", O_RDONLY); SAY(flock(n, LOCK_SH | LOCK_NB)); close(n));
	CASE(ioctl, SAY(syscall(SYS_ioctl, fd, FIONREAD, &n)); SAY(n); SAY(syscall(SYS_ioctl, fd, FICLONE, other) * 0));
	CASE(pidfd_getfd, int pid = syscall(SYS_pidfd_open, getpid(), 0); SAY(n = syscall(SYS_pidfd_getfd, pid, fd, 0));
		SAY(read(n, buf, 10)); SAY(write(n, two, 20)); close(n); close(pid));
#ifdef SYS_dup2
	CASE(dup2, SAY(n = syscall(SYS_dup2, fd, 51)); SAY(write(n, two, 10)); SAY(syscall(SYS_dup2, other, 51)); SAY(read(n, buf, 10)); close(n));
#endif
}

/* None of these calls changes the file. */
static void rights(void)
{
	CASE(setuid, SAY(syscall(SYS_setuid, getuid())); SAY(read(fd, buf, 10)));
	CASE(setgid, SAY(syscall(SYS_setgid, getgid())); SAY(read(fd, buf, 10)));
	CASE(setreuid, SAY(syscall(SYS_setreuid, -1, -1)); SAY(read(fd, buf, 10)));
	CASE(setregid, SAY(syscall(SYS_setregid, -1, -1)); SAY(read(fd, buf, 10)));
	CASE(setresuid, SAY(syscall(SYS_setresuid, -1, -1, -1)); SAY(read(fd, buf, 10)));
	CASE(setresgid, SAY(syscall(SYS_setresgid, -1, -1, -1)); SAY(read(fd, buf, 10)));
	CASE(setfsuid, SAY(syscall(SYS_setfsuid, -1)); SAY(read(fd, buf, 10)));
	CASE(setfsgid, SAY(syscall(SYS_setfsgid, -1)); SAY(read(fd, buf, 10)));
	CASE(setgroups, SAY(syscall(SYS_setgroups, -1, NULL)); SAY(read(fd, buf, 10)));
	CASE(chroot, SAY(syscall(SYS_chroot, NULL)); SAY(read(fd, buf, 10)));
	CASE(setns, SAY(syscall(SYS_setns, -1, 0)); SAY(read(fd, buf, 10)));
	CASE(capset, SAY(syscall(SYS_capset, NULL, NULL)); SAY(read(fd, buf, 10)));
}

static void sizes(void)
{
	struct stat st;
	struct statx sx;
	CASE(ftruncate, SAY(syscall(SYS_ftruncate, fd, 4002L)); SAY(syscall(SYS_ftruncate, fd, 9000L)));
	CASE(truncate, SAY(syscall(SYS_truncate, "f", 4002L)); SAY(pread(fd, buf, 500, 4000)));
	CASE(fallocate, SAY(syscall(SYS_fallocate, fd, 3, 4000L, 2L)); SAY(syscall(SYS_fallocate, fd, 0, 8000L, 5000L)));
	CASE(fadvise64, SAY(syscall(SYS_fadvise64, fd, 0L, 0L, 4)); SAY(pread(fd, buf, 500, 4000)));
	CASE(fsync, SAY(syscall(SYS_fsync, fd)));
	CASE(fdatasync, SAY(syscall(SYS_fdatasync, fd)));
	CASE(sync, SAY(syscall(SYS_sync)));
	CASE(syncfs, SAY(syscall(SYS_syncfs, fd)));
	CASE(sync_file_range, SAY(syscall(SYS_sync_file_range, fd, 0L, 4096L, 7)));
	CASE(fstat, pwrite(fd, two, 10, 9000); SAY(syscall(SYS_fstat, fd, &st)); SAY(st.st_size));
	CASE(newfstatat, pwrite(fd, two, 10, 9000); SAY(syscall(SYS_newfstatat, AT_FDCWD, "f", &st, 0)); SAY(st.st_size));
	CASE(statx, pwrite(fd, two, 10, 9000); SAY(syscall(SYS_statx, AT_FDCWD, "f", 0, STATX_SIZE, &sx)); SAY(sx.stx_size));
#ifdef SYS_stat
	CASE(stat, pwrite(fd, two, 10, 9000); SAY(syscall(SYS_stat, "f", &st)); SAY(st.st_size));
	CASE(lstat, pwrite(fd, two, 10, 9000); SAY(syscall(SYS_lstat, "f", &st)); SAY(st.st_size));
#endif
}

static void opens(void)
{
	struct open_how how = {.flags = O_RDWR}, cut = {.flags = O_RDWR | O_TRUNC};
	int n;
	CASE(openat, SAY(n = syscall(SYS_openat, AT_FDCWD, "f", O_WRONLY)); SAY(write(n, two, 10)); SAY(syscall(SYS_write, n, two, 10)); close(n));
	CASE(openat2, SAY(n = syscall(SYS_openat2, AT_FDCWD, "f", &how, sizeof how)); SAY(write(n, two, 10)); SAY(pread(fd, buf, 20, 0));
		SAY(pwrite(fd, two, 20, 5)); SAY(read(n, buf, 50)); close(n); SAY(syscall(SYS_openat2, AT_FDCWD, "f", &how, 3L));
		SAY(syscall(SYS_openat2, AT_FDCWD, "f", 1L, sizeof how)));
	CASE(openat2, close(fd); SAY(n = syscall(SYS_openat2, AT_FDCWD, "f", &cut, sizeof cut)); SAY(pread(n, buf, 20, 0)); SAY(pwrite(n, two, 20, 5));
		SAY(pread(n, buf, 50, 0)); close(n); fd = open("f", O_RDWR));
	CASE(open_by_handle_at,
		struct { struct file_handle h; char bytes[MAX_HANDLE_SZ]; } handle = {{MAX_HANDLE_SZ}};
		int mount;
		int here = open(".", O_RDONLY | O_DIRECTORY);
		if (name_to_handle_at(AT_FDCWD, "f", &handle.h, &mount, 0) == 0) {
			/* The call must not wait for a lease. */
			SAY(n = syscall(SYS_open_by_handle_at, here, &handle, O_RDWR | O_NONBLOCK));
			close(n);
			SAY(n = syscall(SYS_open_by_handle_at, here, &handle, O_RDWR));
			SAY(write(n, two, 10)); SAY(pread(fd, buf, 20, 0)); SAY(pwrite(fd, two, 20, 5)); SAY(read(n, buf, 50)); close(n);
		}
		close(here));
#ifdef SYS_open
	CASE(open, SAY(n = syscall(SYS_open, "f", O_RDWR | O_TRUNC)); SAY(write(n, two, 10)); close(n));
	CASE(creat, SAY(n = syscall(SYS_creat, "f", 0644)); SAY(write(n, two, 10)); SAY(pread(fd, buf, 20, 0)); close(n));
#endif
}

static const long unwritable = 100;

static void copies(void)
{
	long from = 4000, to = 10, left = 3000, n;
	CASE(copy_file_range, from = 4000; to = 10; SAY(syscall(SYS_copy_file_range, fd, &from, other, &to, 50L, 0)); SAY(from); SAY(to);
		SAY(syscall(SYS_copy_file_range, fd, NULL, other, NULL, 50L, 0)));
	/* Both offsets in one place. */
	CASE(copy_file_range, from = 100; SAY(syscall(SYS_copy_file_range, fd, &from, other, &from, 50L, 0)); SAY(from));
	/* Offsets that the kernel can't read, or can't return. */
	CASE(copy_file_range, from = 100; SAY(syscall(SYS_copy_file_range, fd, 16L, other, NULL, 50L, 0));
		SAY(syscall(SYS_copy_file_range, fd, &from, other, 16L, 50L, 0)); SAY(from));
	CASE(copy_file_range, SAY(syscall(SYS_copy_file_range, fd, &unwritable, other, NULL, 50L, 0)));
	CASE(sendfile, SAY(syscall(SYS_sendfile, other, fd, &unwritable, 50L)));
	CASE(sendfile, SAY(syscall(SYS_sendfile, other, fd, 16L, 50L)));
	CASE(sendfile, from = 3990; SAY(syscall(SYS_sendfile, other, fd, &from, 50L)); SAY(from); SAY(syscall(SYS_sendfile, other, fd, NULL, 50L)));
	CASE(splice, pipe(p); from = 3990; SAY(syscall(SYS_splice, fd, &from, p[1], NULL, 50L, 0)); SAY(from);
		SAY(syscall(SYS_splice, p[0], NULL, other, NULL, 50L, 0)); SAY(syscall(SYS_splice, fd, NULL, p[1], NULL, 50L, 0));
		SAY(read(p[0], buf, 100)); close(p[0]), close(p[1]));
	CASE(mmap, char *m = (char *)syscall(SYS_mmap, NULL, (long)BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
		SAY(memcmp(m + 4000, "WAITS", 5)); memcpy(m + 10, "mapped", 6); SAY(pread(fd, buf, 100, 0)); SAY(pwrite(fd, "seen", 4, 20));
		SAY(memcmp(m + 20, "seen", 4)); munmap(m, BYTES); SAY((long)syscall(SYS_mmap, NULL, 0L, PROT_READ, MAP_SHARED, fd, 0L)));
}

/* Times, modes and attributes keep the values that the program set, even after a later write-back. */
static void kept(const char *what)
{
	struct stat st;
	char value[10] = "";
	int n = fgetxattr(fd, "user.x", value, sizeof value);
	close(fd);
	fd = open("f", O_RDWR);
	stat("f", &st);
	printf("  %s: mtime %ld, mode %o, attribute %d, links %ld\n", what, st.st_mtime < 2000 ? (long)st.st_mtime : -1, st.st_mode, n, (long)st.st_nlink);
}

static void metadata(void)
{
	struct timespec ts[2] = {{1000}, {1000}};
	long utimes[4] = {1000, 0, 1000, 0}, times[2] = {1000, 1000};
	CASE(fchmod, SAY(syscall(SYS_fchmod, fd, 06755)); kept("mode"));
	CASE(fchmodat, SAY(syscall(SYS_fchmodat, AT_FDCWD, "f", 06755)); kept("mode"));
	CASE(fchmodat2, syscall(SYS_fchmodat2, AT_FDCWD, "f", 06755, 0); kept("mode"));
	CASE(fchown, SAY(syscall(SYS_fchown, fd, getuid(), getgid())); kept("owner"));
	CASE(fchownat, SAY(syscall(SYS_fchownat, AT_FDCWD, "f", getuid(), getgid(), 0)); kept("owner"));
	CASE(utimensat, SAY(syscall(SYS_utimensat, AT_FDCWD, "f", ts, 0)); kept("times"));
	CASE(utimensat, SAY(syscall(SYS_utimensat, fd, NULL, ts, 0)); kept("times"));
	CASE(fsetxattr, syscall(SYS_fsetxattr, fd, "user.x", "1", 1L, 0); kept("attribute"));
	CASE(setxattr, syscall(SYS_setxattr, "f", "user.x", "1", 1L, 0); kept("attribute"));
	CASE(lsetxattr, syscall(SYS_lsetxattr, "f", "user.x", "1", 1L, 0); kept("attribute"));
	CASE(fremovexattr, fsetxattr(fd, "user.x", "1", 1, 0); syscall(SYS_fremovexattr, fd, "user.x"); kept("attribute"));
	CASE(removexattr, fsetxattr(fd, "user.x", "1", 1, 0); syscall(SYS_removexattr, "f", "user.x"); kept("attribute"));
	CASE(lremovexattr, fsetxattr(fd, "user.x", "1", 1, 0); syscall(SYS_lremovexattr, "f", "user.x"); kept("attribute"));
	CASE(linkat, SAY(syscall(SYS_linkat, AT_FDCWD, "f", AT_FDCWD, "h", 0)); kept("link"); show("h", fd));
	CASE(renameat, SAY(syscall(SYS_renameat, AT_FDCWD, "f", AT_FDCWD, "h")); show("h", fd));
	CASE(renameat2, SAY(syscall(SYS_renameat2, AT_FDCWD, "f", AT_FDCWD, "g", RENAME_EXCHANGE)); show("g", fd));
#ifdef SYS_chmod
	CASE(chmod, SAY(syscall(SYS_chmod, "f", 06755)); kept("mode"));
	CASE(chown, SAY(syscall(SYS_chown, "f", getuid(), getgid())); kept("owner"));
	CASE(lchown, SAY(syscall(SYS_lchown, "f", getuid(), getgid())); kept("owner"));
	CASE(utime, SAY(syscall(SYS_utime, "f", times)); kept("times"));
	CASE(utimes, SAY(syscall(SYS_utimes, "f", utimes)); kept("times"));
	CASE(futimesat, SAY(syscall(SYS_futimesat, AT_FDCWD, "f", utimes)); kept("times"));
	CASE(link, SAY(syscall(SYS_link, "f", "h")); kept("link"); show("h", fd));
	CASE(rename, SAY(syscall(SYS_rename, "f", "h")); show("h", fd));
#endif
}

/* In the child: writes at its current offset, opens a file again, and exits. */
static void child(void)
{
	int n = open("g", O_RDWR);
	write(fd, "child", 5);
	pwrite(n, "child", 5, 300);
	pread(n, buf, 10, 300);
	write(fd, memcmp(buf, "child", 5) ? "stale" : "right", 5);
	close(n);
	syscall(SYS_exit_group, 0);
}

static char stack[1 << 16] __attribute__((aligned(16)));

static int as_child(void *unused) { child(); return 0; }

static void reap(long pid)
{
	int status = -1;
	SAY(waitpid(pid, &status, 0) == pid);
	SAY(status);
	SAY(write(fd, "parent", 6));
}

static void *apart(void *unused)
{
	SAY(syscall(SYS_unshare, CLONE_FILES));
	SAY(pwrite(fd, "apart", 5, 10));
	return NULL;
}

static void processes(void)
{
	long pid;
	struct clone_args args = {.exit_signal = SIGCHLD};
	char *cat[] = {"cat", "f", "g", NULL};
	extern char **environ;
	CASE(clone, if ((pid = syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L)) == 0) child(); reap(pid));
	/* This is impossible on the kernel alone: the child would return over its parent's stack. */
	int has_library = getenv("LD_PRELOAD") != NULL;
	long vfork_flags = has_library ? CLONE_VM | CLONE_VFORK : 0;
	CASE(clone, if ((pid = syscall(SYS_clone, vfork_flags | SIGCHLD, 0L, 0L, 0L, 0L)) == 0) child(); reap(pid));
	CASE(clone3, if ((pid = syscall(SYS_clone3, &args, sizeof args)) == 0) child(); reap(pid));
	/* Arguments that the kernel refuses: none, too few, or unreadable ones. */
	CASE(clone3, SAY(syscall(SYS_clone3, NULL, sizeof args)); SAY(syscall(SYS_clone3, 16L, sizeof args));
		SAY(syscall(SYS_clone3, &args, 32L)); SAY(syscall(SYS_clone3, NULL, 0L)); SAY(write(fd, two, 10)));
#ifdef SYS_fork
	CASE(fork, if ((pid = syscall(SYS_fork)) == 0) child(); reap(pid));
	CASE(vfork, if ((pid = syscall(has_library ? SYS_vfork : SYS_fork)) == 0) child(); reap(pid));
#endif
	/* libc's function of the same name. */
	CASE(clone, fflush(stdout); SAY((pid = clone(as_child, stack + sizeof stack, SIGCHLD, NULL)) > 0); reap(pid));
	CASE(exit_group, if ((pid = fork()) == 0) child(); reap(pid));
	CASE(execve, fflush(stdout); if ((pid = fork()) == 0) {
		int n = open("h", O_RDWR | O_CREAT, 0644);
		write(n, "last words", 10); lseek(n, 5, SEEK_SET); dup2(n, 0);
		syscall(SYS_execve, "/bin/cat", (char *[]){"cat", NULL}, environ); _exit(1); } reap(pid));
	CASE(execveat, fflush(stdout); if ((pid = fork()) == 0) {
		int n = open("h", O_RDWR | O_CREAT, 0644);
		write(n, "last words", 10); lseek(n, 5, SEEK_SET); dup2(n, 0);
		syscall(SYS_execveat, AT_FDCWD, "/bin/cat", (char *[]){"cat", NULL}, environ, 0); _exit(1); } reap(pid));
	CASE(execve, SAY(syscall(SYS_execve, "/none", cat, environ)); SAY(write(fd, two, 10)));
}

/* A description that another process shares, offset included. */
static void sent(void)
{
	for (int many = 0; many < 2; many++) {
		begin(many ? "sendmmsg" : "sendmsg");
		int s[2];
		socketpair(AF_UNIX, SOCK_DGRAM, 0, s);
		fflush(stdout);
		pid_t pid = fork();
		char space[CMSG_SPACE(sizeof(int))] = {0}, byte;
		struct iovec v = {&byte, 1};
		struct mmsghdr m = {{.msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space}};
		if (pid == 0) {
			close(fd);
			recvmsg(s[1], &m.msg_hdr, 0);
			int got = *(int *)CMSG_DATA(CMSG_FIRSTHDR(&m.msg_hdr));
			write(got, "received", 8);
			_exit(0);
		}
		close(fd);
		fd = open("f", O_RDWR);
		lseek(fd, 50, SEEK_SET);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m.msg_hdr);
		c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
		*(int *)CMSG_DATA(c) = fd;
		SAY(many ? syscall(SYS_sendmmsg, s[0], &m, 1, 0) : syscall(SYS_sendmsg, s[0], &m.msg_hdr, 0));
		reap(pid);
		end();
		close(s[0]), close(s[1]);
	}
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	umask(022);
	transfers();
	descriptors();
	sizes();
	opens();
	copies();
	metadata();
	rights();
	processes();
	sent();
	/* The last step: the kernel serves all files from here on. */
	CASE(unshare, pthread_t t; pthread_create(&t, NULL, apart, NULL); pthread_join(t, NULL));
	CASE(close_range, SAY(syscall(SYS_close_range, 400, 500, CLOSE_RANGE_UNSHARE)));
	return 0;
}
