/* Calls functions that few programs use, on files whose last bytes may be in the cache only, and prints their
 * results and the visible bytes. The output must be the same with the library and without it. */
#define _GNU_SOURCE
#include <aio.h>
#include <dirent.h>
#include <fts.h>
#include <ftw.h>
#include <libaio.h>
#include <pty.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <utmp.h>

#include "check.h"

extern int __vdprintf_chk(int, int, const char *, va_list);
extern int __dprintf_chk(int, int, const char *, ...);
extern int io_uring_queue_init(unsigned, void *, unsigned);
extern int io_uring_queue_init_params(unsigned, void *, void *);
extern int io_uring_queue_init_mem(unsigned, void *, void *, void *, size_t);
extern void (*__sysv_signal(int, void (*)(int)))(int);

static char text[1 << 14];
static int fd;

static void say(const char *what, long result)
{
	printf("%-40s %ld errno %d\n", what, result, result == -1 ? errno : 0);
	fflush(stdout);
	errno = 0;
}
#define SAY(call) (errno = 0, say(#call, (long)(call)))

/* The bytes of the file, as the library and the kernel return them. */
static void contents(const char *path)
{
	char buf[64] = "";
	int other = open(path, O_RDONLY);
	long n = other < 0 ? -1 : read(other, buf, sizeof buf - 1);
	printf("  %s: %ld %.*s\n", path, n, (int)strcspn(buf, "\n"), buf);
	close(other);
}

static int open_with(const char *path, const char *bytes)
{
	int new = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(new >= 0 && write(new, bytes, strlen(bytes)) == (long)strlen(bytes));
	return new;
}

/* ---- POSIX AIO ---- */

static long finish(struct aiocb64 *block)
{
	const struct aiocb64 *list[] = {block};
	while (aio_error64(block) == EINPROGRESS)
		aio_suspend64(list, 1, NULL);
	return aio_return64(block);
}

#define ASYNC(call, block) (SAY(call), SAY(finish(&(block))))

static void posix_aio(void)
{
	char buf[16] = "";
	struct aiocb64 block = {.aio_fildes = fd, .aio_buf = buf, .aio_nbytes = 4};
	struct aiocb64 *list[] = {&block};
	fd = open_with("aio", "0123456789");
	block.aio_fildes = fd;
	ASYNC(aio_read64(&block), block);
	printf("  read %s\n", buf);
	CHECK(pwrite(fd, "ab", 2, 0) == 2);
	ASYNC(aio_read((struct aiocb *)&block), block);
	printf("  read %s\n", buf);
	ASYNC(aio_fsync64(O_SYNC, &block), block);
	ASYNC(aio_fsync(O_DSYNC, (struct aiocb *)&block), block);
	memcpy(buf, "WXYZ", 4);
	ASYNC(aio_write64(&block), block);
	CHECK(pread(fd, text, 10, 0) == 10);
	printf("  %.10s\n", text);
	block.aio_offset = 5;
	ASYNC(aio_write((struct aiocb *)&block), block);
	CHECK(pread(fd, text, 10, 0) == 10);
	printf("  %.10s\n", text);
	block.aio_lio_opcode = LIO_WRITE;
	block.aio_offset = 20;
	SAY(lio_listio64(LIO_WAIT, list, 1, NULL));
	block.aio_offset = 30;
	SAY(lio_listio(LIO_WAIT, (struct aiocb **)list, 1, NULL));
	SAY(lseek(fd, 0, SEEK_END));
	close(fd);
	fd = open_with("aio2", "first");
	block = (struct aiocb64){.aio_fildes = fd, .aio_buf = buf, .aio_nbytes = 4, .aio_lio_opcode = LIO_READ};
	SAY(lio_listio64(LIO_WAIT, list, 1, NULL));
	printf("  read %s\n", buf);
	close(fd);
}

/* ---- printing to a descriptor ---- */

static int vprint(int checked, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int n = checked ? __vdprintf_chk(fd, 1, format, args) : vdprintf(fd, format, args);
	va_end(args);
	return n;
}

static void printing(void)
{
	fd = open_with("print", "one ");
	SAY(vprint(0, "%s ", "two"));
	SAY(write(fd, "three ", 6));
	SAY(vprint(1, "%d ", 4));
	SAY(write(fd, "five ", 5));
	SAY(__dprintf_chk(fd, 1, "%s ", "six"));
	SAY(write(fd, "seven", 5));
	contents("print");
	close(fd);
}

/* ---- sizes and times ---- */

#ifdef __x86_64__
/* The symbols that programs used before glibc 2.33. */
__asm__(".symver old_xstat, __xstat@GLIBC_2.2.5");
__asm__(".symver old_lxstat, __lxstat@GLIBC_2.2.5");
__asm__(".symver old_fxstat, __fxstat@GLIBC_2.2.5");
__asm__(".symver old_fxstatat, __fxstatat@GLIBC_2.4");
__asm__(".symver old_xstat64, __xstat64@GLIBC_2.2.5");
__asm__(".symver old_lxstat64, __lxstat64@GLIBC_2.2.5");
__asm__(".symver old_fxstat64, __fxstat64@GLIBC_2.2.5");
__asm__(".symver old_fxstatat64, __fxstatat64@GLIBC_2.4");
extern int old_xstat(int, const char *, struct stat *), old_lxstat(int, const char *, struct stat *);
extern int old_fxstat(int, int, struct stat *), old_fxstatat(int, int, const char *, struct stat *, int);
extern int old_xstat64(int, const char *, struct stat *), old_lxstat64(int, const char *, struct stat *);
extern int old_fxstat64(int, int, struct stat *), old_fxstatat64(int, int, const char *, struct stat *, int);
#define OLD_STAT(call) \
	do { \
		CHECK(write(fd, text, 100) == 100); \
		SAY(call); \
		printf("  size %ld\n", (long)st.st_size); \
		st.st_size = 0; \
	} while (0)

static void old_stat(void)
{
	struct stat st = {0};
	fd = open_with("old", "x");
	OLD_STAT(old_xstat(1, "old", &st));
	OLD_STAT(old_lxstat(1, "old", &st));
	OLD_STAT(old_fxstat(1, fd, &st));
	OLD_STAT(old_fxstatat(1, AT_FDCWD, "old", &st, 0));
	OLD_STAT(old_xstat64(1, "old", &st));
	OLD_STAT(old_lxstat64(1, "old", &st));
	OLD_STAT(old_fxstat64(1, fd, &st));
	OLD_STAT(old_fxstatat64(1, AT_FDCWD, "old", &st, 0));
	close(fd);
}
#else
static void old_stat(void) {}
#endif

static long seen;
static int visit(const char *path, const struct stat64 *st, int type)
{
	seen += type == FTW_F ? st->st_size : (long)(path == NULL);
	return 0;
}
static int visit_more(const char *path, const struct stat64 *st, int type, struct FTW *more)
{
	return visit(path, st, type) + (more == NULL);
}
static int by_name(const FTSENT64 **a, const FTSENT64 **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

static void trees(void)
{
	char *paths[] = {"tree", NULL};
	FTSENT64 *entry;
	FTSENT *child;
	mkdir("tree", 0755);
	fd = open_with("tree/file", "0123456789");
	SAY(ftw64("tree", visit, 4));
	SAY(seen);
	CHECK(write(fd, text, 1000) == 1000);
	SAY(nftw64("tree", visit_more, 4, 0));
	SAY(seen);
	CHECK(write(fd, text, 1000) == 1000);
	FTS64 *tree = fts64_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, by_name);
	CHECK(tree != NULL && fts64_read(tree) != NULL);
	CHECK(write(fd, text, 1000) == 1000);
	for (entry = fts64_children(tree, 0); entry; entry = entry->fts_link)
		printf("  %s %ld\n", entry->fts_name, (long)entry->fts_statp->st_size);
	CHECK(write(fd, text, 1000) == 1000);
	while ((entry = fts64_read(tree)))
		if (entry->fts_info == FTS_F)
			printf("  %s %s\n", entry->fts_name, entry->fts_statp->st_size >= 3010 ? "grown" : "old");
	fts64_close(tree);
	FTS *other = fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
	CHECK(other != NULL && fts_read(other) != NULL);
	CHECK(write(fd, text, 1000) == 1000);
	for (child = fts_children(other, 0); child; child = child->fts_link)
		printf("  %s %ld\n", child->fts_name, (long)child->fts_statp->st_size);
	fts_close(other);
	close(fd);
}

/* A number that libc closes, and then opens. */
static void directory(void)
{
	struct stat st;
	char byte = 0;
	fd = open_with("again", "0123456789");
	close(fd);
	int number = open(".", O_RDONLY);
	DIR *listed = fdopendir(number);
	CHECK(listed != NULL && closedir(listed) == 0);
	FILE *stream = fopen("again", "r+");
	CHECK(stream != NULL);
	number = fileno(stream);
	for (int i = 0; i < 200; i++)
		CHECK(pread(number, &byte, 1, 3) == 1);
	CHECK(fseek(stream, 3, SEEK_SET) == 0 && fputc('x', stream) == 'x' && fflush(stream) == 0);
	CHECK(pread(number, &byte, 1, 3) == 1);
	printf("  %c\n", byte);
	CHECK(fclose(stream) == 0 && stat("again", &st) == 0);
	SAY(st.st_size);
}

static void times(void)
{
	struct timeval set[2] = {{1000, 5}, {2000, 7}};
	struct stat st;
	fd = open_with("times", "x");
	SAY(futimes(fd, set));
	close(fd);
	CHECK(stat("times", &st) == 0);
	printf("  %ld %ld\n", (long)st.st_atim.tv_sec, (long)st.st_mtim.tv_sec);
	fd = open("times", O_WRONLY);
	CHECK(write(fd, "yy", 2) == 2);
	set[1].tv_sec = 3000;
	SAY(lutimes("times", set));
	close(fd);
	CHECK(stat("times", &st) == 0);
	printf("  %ld %ld %ld\n", (long)st.st_atim.tv_sec, (long)st.st_mtim.tv_sec, (long)st.st_size);
}

/* Calls that are newer than libc's headers: their numbers are the same on all architectures. */
enum { SETXATTRAT = 463, REMOVEXATTRAT = 466, FILE_GETATTR = 468, FILE_SETATTR = 469 };

static void attributes(void)
{
	struct { uint64_t value; uint32_t size, flags; } args = {(uintptr_t)"v", 1, 0};
	char attr[24] = {0};
	fd = open_with("attributes", "x");
	/* SYS_setxattrat SYS_removexattrat SYS_file_setattr */
	SAY(syscall(SETXATTRAT, AT_FDCWD, "attributes", 0, "user.a", &args, sizeof args));
	SAY(syscall(REMOVEXATTRAT, AT_FDCWD, "attributes", 0, "user.a"));
	SAY(syscall(FILE_GETATTR, AT_FDCWD, "attributes", attr, sizeof attr, 0));
	SAY(syscall(FILE_SETATTR, AT_FDCWD, "attributes", attr, sizeof attr, 0));
	contents("attributes");
	close(fd);
}

/* Files that the kernel would use itself, and refuses. */
static void by_the_kernel(void)
{
	fd = open_with("refused", "neither");
	SAY(swapon("refused", 0));
	SAY(syscall(SYS_swapon, "refused", 0));
	SAY(acct("."));
	SAY(syscall(SYS_acct, "no such file"));
	SAY(syscall(SYS_finit_module, fd, "", 0));
	SAY(syscall(SYS_kexec_file_load, fd, fd, 0, NULL, 0));
	contents("refused");
	close(fd);
}

/* ---- queues ---- */

static int is_done;

static void done(io_context_t queue, struct iocb *block, long res, long res2)
{
	(void)queue, (void)block;
	is_done = 1;
	printf("  done %ld %ld\n", res, res2);
}

static void queues(void)
{
	io_context_t queue = NULL;
	char buf[16];
	struct iocb block, *blocks[] = {&block};
	struct io_event event;
	struct timespec second = {1, 0};
	fd = open_with("queue", "0123456789");
	SAY(io_queue_init(4, &queue));
	io_prep_pread(&block, fd, buf, 10, 0);
	io_set_callback(&block, done);
	SAY(io_submit(queue, 1, blocks));
	/* The call waits for no event; a read that misses ends later. */
	SAY(io_queue_wait(queue, &second));
	int result;
	while ((result = io_queue_run(queue)) == 0 && !is_done)
		usleep(1000);
	SAY(result);
	SAY(io_submit(queue, 1, blocks));
	SAY(syscall(SYS_io_pgetevents, queue, 1, 1, &event, NULL, NULL));
	SAY(io_queue_release(queue));
	close(fd);
}

/* ---- other programs ---- */

/* Runs `child`, whose output is printed. */
static void run(void (*child)(void))
{
	int ends[2], status;
	char buf[256];
	ssize_t n;
	CHECK(pipe(ends) == 0);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		dup2(ends[1], 1);
		close(ends[0]), close(ends[1]);
		fd = open_with("child", "of the child");
		child();
		_exit(9);
	}
	close(ends[1]);
	while ((n = read(ends[0], buf, sizeof buf)) > 0)
		fwrite(buf, 1, (size_t)n, stdout);
	close(ends[0]);
	CHECK(waitpid(pid, &status, 0) == pid);
	printf(" status %d\n", status);
	contents("child");
}

static char *cat[] = {"cat", "child", NULL};
static void with_path(void) { execvp("cat", cat); }
static void with_path_and_environment(void) { execvpe("cat", cat, environ); }
static void by_descriptor(void)
{
	int program = open("/bin/cat", O_RDONLY | O_CLOEXEC);
	fexecve(program, cat, environ);
}
static void on_a_terminal(void)
{
	int master, slave;
	char buf[8] = "";
	CHECK(openpty(&master, &slave, NULL, NULL, NULL) == 0);
	int pipe_end = dup(1);
	CHECK(dup2(fd, 0) == 0 && dup2(fd, 1) == 1);
	setsid();
	CHECK(login_tty(slave) == 0);
	/* Numbers 0 and 1 belong to the terminal: writes to them do not reach the file. */
	CHECK(write(1, "tty", 3) == 3 && read(master, buf, 3) == 3);
	CHECK(write(pipe_end, buf, 3) == 3);
	_exit(0);
}

/* ---- handlers ---- */

static volatile int handled;
static void handler(int signal)
{
	char buf[4];
	handled += signal == SIGUSR1 && pread(fd, buf, 4, 0) == 4 && memcmp(buf, "hand", 4) == 0;
}
static void signals(void)
{
	fd = open_with("signals", "handler");
	CHECK(__sysv_signal(SIGUSR1, handler) != SIG_ERR && raise(SIGUSR1) == 0);
	CHECK(sysv_signal(SIGUSR1, handler) == SIG_DFL && raise(SIGUSR1) == 0);
	CHECK(sigset(SIGUSR1, handler) == SIG_DFL && raise(SIGUSR1) == 0);
	SAY(handled);
	SAY(sigignore(SIGUSR1));
	SAY(raise(SIGUSR1));
	SAY(handled);
	close(fd);
}

/* ---- io_uring, by a library's functions: the kernel serves its files from then on ---- */

static void rings(void)
{
	int other = open_with("ring", "before ");
	SAY(io_uring_queue_init(8, text, 0));
	SAY(io_uring_queue_init_params(8, text, text));
	SAY(io_uring_queue_init_mem(8, text, text, text, sizeof text));
	CHECK(write(other, "after", 5) == 5);
	contents("ring");
	close(other);
}

int main(void)
{
	memset(text, 't', sizeof text);
	posix_aio(), printing(), old_stat(), trees(), directory(), times(), attributes(), by_the_kernel(), queues();
	run(with_path), run(with_path_and_environment), run(by_descriptor), run(on_a_terminal);
	signals(), rings();
	return 0;
}
