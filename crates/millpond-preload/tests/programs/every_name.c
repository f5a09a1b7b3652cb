/* Calls every file function that the library replaces, under each of its names, and prints each result. The output
 * must be the same with the library and without it.
 *
 * Fortified names are reached by compiling with -D_FORTIFY_SOURCE=2 -O2, and by dlsym here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

static char buf[1 << 16];
static long sizes;
/* The compiler does not know the size of this memory, so it accepts every length. */
static char *volatile unsized = buf;

static unsigned hash(const char *p, long n)
{
	unsigned h = 5381;
	for (long i = 0; i < n; i++)
		h = h * 33 + (unsigned char)p[i];
	return h;
}

static void say(const char *what, long result)
{
	int e = errno;
	if (result < 0)
		printf("%-28s %ld errno %d\n", what, result, e);
	else
		printf("%-28s %ld %08x\n", what, result, hash(buf, sizeof buf));
	errno = 0;
}
#define SAY(call) (memset(buf, 0x5a, sizeof buf), errno = 0, say(#call, (long)(call)))
/* Not the number itself: the kernel chooses it, and the output stays readable without it. */
#define OPEN(var, call) ((var) = (call), printf("%-28s fd %d\n", #call, var))

static void position(int fd) { printf("%-28s %ld\n", "  offset", (long)lseek(fd, 0, SEEK_CUR)); }
static void size(int fd)
{
	struct stat st;
	fstat(fd, &st);
	printf("%-28s %ld\n", "  size", (long)st.st_size);
}

static void contents(const char *path)
{
	static char all[1 << 20];
	int fd = open(path, O_RDONLY);
	long n = read(fd, all, sizeof all);
	printf("%-28s %ld %08x\n", "  contents", n, hash(all, n));
	close(fd);
}

static void opens(void)
{
	int fd;
	typedef int open2(const char *, int);
	typedef int openat2(int, const char *, int);
	OPEN(fd, open("a", O_RDWR | O_CREAT, 0644));
	for (int i = 0; i < 50000; i++)
		buf[i] = (char)(i * 7 + i / 251);
	printf("%ld\n", (long)write(fd, buf, 50000));
	close(fd);
	OPEN(fd, open64("a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, openat(AT_FDCWD, "a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, openat64(AT_FDCWD, "a", O_RDWR)); SAY(read(fd, buf, 100)); close(fd);
	open2 *o2 = dlsym(RTLD_DEFAULT, "__open_2"), *o642 = dlsym(RTLD_DEFAULT, "__open64_2");
	openat2 *oa2 = dlsym(RTLD_DEFAULT, "__openat_2"), *oa642 = dlsym(RTLD_DEFAULT, "__openat64_2");
	OPEN(fd, o2("a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, o642("a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, oa2(AT_FDCWD, "a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, oa642(AT_FDCWD, "a", O_RDONLY)); SAY(read(fd, buf, 100)); close(fd);
	OPEN(fd, creat("b", 0600)); SAY(write(fd, buf, 10)); SAY(read(fd, buf, 10)); close(fd);
	OPEN(fd, creat64("b", 0600)); SAY(write(fd, buf, 11)); close(fd); contents("b");
	OPEN(fd, open(".", O_RDONLY)); SAY(read(fd, buf, 10)); close(fd);
	OPEN(fd, open(".", O_RDWR)); OPEN(fd, open("none", O_RDONLY)); OPEN(fd, open("a/b", O_RDONLY));
	OPEN(fd, open("a", O_RDWR | O_CREAT | O_EXCL, 0600));
	OPEN(fd, open(NULL, O_RDONLY)); say("open(NULL)", fd);
	OPEN(fd, open(".", O_TMPFILE | O_RDWR, 0600)); SAY(write(fd, buf, 5000));
	SAY(pread(fd, buf, 6000, 10)); close(fd);
	OPEN(fd, open("a", O_PATH)); SAY(read(fd, buf, 10)); close(fd);
	OPEN(fd, open("a", O_RDONLY | O_NOFOLLOW)); SAY(read(fd, buf, 10)); close(fd);
	symlink("a", "link");
	OPEN(fd, open("link", O_RDONLY | O_NOFOLLOW)); OPEN(fd, open("link", O_RDONLY));
	SAY(read(fd, buf, 10)); close(fd);
	char t1[] = "tXXXXXX", t2[] = "tXXXXXXs", t3[] = "tXXXXXX", t4[] = "tXXXXXXs", t5[] = "tXXXXXX";
	OPEN(fd, mkstemp(t1)); SAY(write(fd, buf, 100)); SAY(pread(fd, buf, 10, 5)); close(fd);
	OPEN(fd, mkstemps(t2, 1)); SAY(write(fd, buf, 100)); SAY(pread(fd, buf, 10, 5)); close(fd);
	OPEN(fd, mkostemp(t3, O_APPEND)); SAY(write(fd, buf, 100)); SAY(pread(fd, buf, 10, 5)); close(fd);
	OPEN(fd, mkostemps64(t4, 1, O_CLOEXEC)); SAY(write(fd, buf, 100)); close(fd);
	OPEN(fd, mkstemp64(t5)); SAY(write(fd, buf, 100)); close(fd);
	unlink(t1); unlink(t2); unlink(t3); unlink(t4); unlink(t5);
}

static void reads(void)
{
	int fd;
	typedef ssize_t read_chk(int, void *, size_t, size_t);
	typedef ssize_t pread_chk(int, void *, size_t, off_t, size_t);
	read_chk *rc = dlsym(RTLD_DEFAULT, "__read_chk");
	pread_chk *pc = dlsym(RTLD_DEFAULT, "__pread_chk"), *pc64 = dlsym(RTLD_DEFAULT, "__pread64_chk");
	OPEN(fd, open("a", O_RDONLY));
	for (int round = 0; round < 2; round++) {
		lseek(fd, 0, SEEK_SET);
		SAY(read(fd, buf, 1)); SAY(read(fd, buf, 0)); SAY(read(fd, buf, 5000)); position(fd);
		SAY(rc(fd, buf, 77, sizeof buf)); position(fd);
		SAY(pread(fd, buf, 4096, 4096)); SAY(pread64(fd, buf, 9000, 100));
		SAY(pread(fd, buf, 0, 100)); SAY(pread(fd, buf, 100, 49990)); SAY(pread(fd, buf, 100, 50000));
		SAY(pread(fd, buf, 100, 60000)); SAY(pread(fd, buf, 100, -1)); SAY(pread(fd, buf, 1, LONG_MAX));
		SAY(pread(fd, buf, 100, LONG_MAX - 10)); SAY(pread(fd, NULL, 0, 0));
		SAY(pc(fd, buf, 10, 3, sizeof buf)); SAY(pc64(fd, buf, 10, 3, sizeof buf));
		struct iovec v[] = {{buf, 10}, {NULL, 0}, {buf + 100, 5000}, {buf + 6000, 3}};
		SAY(readv(fd, v, 4)); position(fd); SAY(readv(fd, v, 0)); SAY(readv(fd, v, -1));
		SAY(readv(fd, v, 1025)); SAY(readv(fd, NULL, 2)); SAY(readv(fd, (void *)16, 1));
		SAY(preadv(fd, v, 4, 300)); SAY(preadv64(fd, v, 4, 49000)); SAY(preadv(fd, v, 4, -3));
		SAY(preadv2(fd, v, 4, 7, 0)); SAY(preadv2(fd, v, 4, -1, 0)); position(fd);
		SAY(preadv64v2(fd, v, 2, 9, 0));
		struct iovec bad[] = {{buf, 10}, {buf, (size_t)-5}};
		SAY(readv(fd, bad, 2)); SAY(preadv(fd, bad, 2, 0));
		SAY(write(fd, buf, 1)); SAY(pwrite(fd, buf, 1, 0)); SAY(writev(fd, v, 1)); SAY(ftruncate(fd, 3));
		SAY(read(fd, buf, sizeof buf)); SAY(read(fd, buf, 10)); position(fd);
		SAY(read(fd, (void *)8, 10)); lseek(fd, 0, SEEK_SET); SAY(read(fd, (void *)8, 10)); position(fd);
		SAY(pread(fd, (void *)-1, 10, 0)); SAY(read(fd, unsized, (size_t)-1)); SAY(read(fd, unsized, LONG_MAX));
		char *half = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		munmap(half + 4096, 4096);
		SAY(pread(fd, half + 4000, 200, 0)); SAY(pread(fd, half + 4096, 200, 0));
		struct iovec torn[] = {{buf, 10}, {half + 4096, 10}};
		SAY(preadv(fd, torn, 2, 0));
		munmap(half, 4096);
	}
	close(fd);
	SAY(read(fd, buf, 1)); SAY(close(fd)); SAY(read(-1, buf, 1)); SAY(pread(99999999, buf, 1, 0));
}

static void writes(void)
{
	int fd;
	char data[9000];
	memset(data, 'x', sizeof data);
	OPEN(fd, open("w", O_RDWR | O_CREAT | O_TRUNC, 0644));
	struct iovec v[] = {{data, 10}, {NULL, 0}, {data + 100, 5000}};
	SAY(write(fd, data, 100)); SAY(write(fd, data, 0)); SAY(pwrite(fd, "hello", 5, 20));
	SAY(pwrite64(fd, "end", 3, 12000)); size(fd); position(fd);
	SAY(writev(fd, v, 3)); position(fd); SAY(pwritev(fd, v, 3, 4000)); SAY(pwritev64(fd, v, 2, 20000));
	SAY(pwritev2(fd, v, 3, 4, 0)); SAY(pwritev2(fd, v, 3, -1, 0)); position(fd);
	SAY(pwritev64v2(fd, v, 1, 5, RWF_DSYNC)); size(fd); contents("w");
	SAY(write(fd, (void *)8, 10)); SAY(pwrite(fd, (void *)8, 10, 100)); position(fd);
	SAY(pwrite(fd, data, 10, -1)); SAY(pwrite(fd, data, 10, LONG_MAX)); SAY(writev(fd, v, 1025));
	SAY(write(fd, data, 0)); SAY(fsync(fd)); SAY(fdatasync(fd)); SAY(pread(fd, buf, 30000, 0));
	char *half = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(half + 4096, 4096);
	SAY(pwrite(fd, half + 4000, 200, 50)); SAY(pread(fd, buf, 300, 0));
	SAY(lseek(fd, 10, SEEK_SET)); SAY(write(fd, half + 4000, 200)); position(fd);
	close(fd); contents("w");
	OPEN(fd, open("w", O_WRONLY)); SAY(read(fd, buf, 1)); SAY(pread(fd, buf, 1, 0));
	SAY(lseek(fd, 0, SEEK_END)); SAY(write(fd, "tail", 4)); close(fd); contents("w");
	OPEN(fd, open("w", O_RDWR | O_APPEND)); SAY(lseek(fd, 3, SEEK_SET)); SAY(write(fd, "app", 3));
	position(fd); SAY(pwrite(fd, "front", 5, 0)); size(fd); position(fd); SAY(writev(fd, v, 1));
	SAY(pread(fd, buf, 100, 0)); SAY(write(fd, (void *)8, 3)); position(fd); close(fd); contents("w");
	munmap(half, 4096);
}

static void offsets(void)
{
	int fd, two, three;
	OPEN(fd, open("a", O_RDWR));
	SAY(lseek(fd, 100, SEEK_SET)); SAY(lseek64(fd, 5, SEEK_CUR)); SAY(lseek(fd, -5, SEEK_CUR));
	SAY(lseek(fd, -1000, SEEK_CUR)); SAY(lseek(fd, -1, SEEK_SET)); SAY(lseek(fd, 0, SEEK_END));
	SAY(lseek(fd, 10, SEEK_END)); SAY(lseek(fd, -60000, SEEK_END)); SAY(lseek(fd, 0, 99));
	SAY(lseek(fd, 0, SEEK_DATA)); SAY(lseek(fd, 0, SEEK_HOLE)); SAY(lseek(fd, LONG_MAX, SEEK_SET));
	SAY(lseek(fd, LONG_MAX, SEEK_CUR)); SAY(lseek(fd, 1L << 40, SEEK_SET)); SAY(read(fd, buf, 10));
	SAY(lseek(fd, 50, SEEK_SET));
	OPEN(two, dup(fd)); OPEN(three, fcntl(fd, F_DUPFD, 20)); SAY(read(two, buf, 10)); position(fd);
	position(three); SAY(lseek(three, 7, SEEK_SET)); SAY(read(fd, buf, 3));
	SAY(dup2(fd, 30)); SAY(read(30, buf, 3)); SAY(dup3(fd, 31, O_CLOEXEC)); SAY(read(31, buf, 3));
	SAY(dup3(fd, fd, 0)); SAY(dup2(fd, fd)); SAY(dup2(99, 98)); SAY(dup2(99, 99)); SAY(dup(99));
	SAY(fcntl(fd, F_DUPFD_CLOEXEC, 40)); SAY(read(40, buf, 3)); position(fd);
	close(fd); SAY(read(two, buf, 5)); close(two); SAY(read(30, buf, 5)); close(three); close(30);
	close(31); SAY(read(40, buf, 5)); SAY(dup2(0, 40)); SAY(read(40, buf, 5)); close(40);
	OPEN(fd, open("w", O_RDWR)); SAY(ftruncate(fd, 100)); size(fd); SAY(pread(fd, buf, 200, 0));
	SAY(ftruncate64(fd, 9000)); SAY(pread(fd, buf, 9000, 0)); SAY(ftruncate(fd, -1)); size(fd);
	SAY(pwrite(fd, "Z", 1, 4095)); SAY(ftruncate(fd, 4095)); SAY(ftruncate(fd, 5000));
	SAY(pread(fd, buf, 5000, 0)); close(fd);
	SAY(truncate("w", 50)); contents("w"); SAY(truncate64("w", 5000)); contents("w");
	OPEN(fd, open("w", O_RDONLY)); SAY(pread(fd, buf, 100, 0)); SAY(truncate("w", 20));
	SAY(pread(fd, buf, 100, 0)); close(fd);
	OPEN(fd, open("a", O_RDONLY)); OPEN(two, open("a", O_RDONLY));
	SAY(read(fd, buf, 10)); SAY(read(two, buf, 20)); position(fd); position(two);
	SAY(lockf(fd, F_TEST, 10)); SAY(flock(fd, LOCK_SH)); SAY(flock(two, LOCK_EX | LOCK_NB));
	close(fd); SAY(flock(two, LOCK_EX | LOCK_NB)); SAY(read(two, buf, 10)); close(two);
	OPEN(fd, open("a", O_RDONLY)); OPEN(two, open("a", O_RDWR)); OPEN(three, open("a", O_WRONLY));
	SAY(pwrite(three, "Q", 1, 3)); SAY(pread(fd, buf, 10, 0)); SAY(pwrite(two, "R", 1, 4));
	SAY(pread(fd, buf, 10, 0)); close(fd); close(two); close(three);
	OPEN(fd, open("a", O_RDWR)); SAY(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND));
	SAY(fcntl(fd, F_SETFL, O_APPEND)); SAY(write(fd, "end", 3)); position(fd); size(fd);
	SAY(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND)); close(fd);
	OPEN(fd, open("a", O_RDONLY)); OPEN(two, open("w", O_RDONLY)); SAY(close_range(fd, two, 0));
	SAY(read(fd, buf, 1)); SAY(read(two, buf, 1));
}

/* Every mode of fallocate, over cached bytes; and the positions of the data. */
static void extents(void)
{
	int fd, reader, modes[] = { 0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
		FALLOC_FL_ZERO_RANGE, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE,
		FALLOC_FL_UNSHARE_RANGE, FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE, 0x1000 };
	long ranges[][2] = { {5000, 3000}, {8192, 8192}, {39000, 900}, {39000, 5000}, {60000, 10},
		{0, 4096}, {-1, 5}, {5, 0}, {5, -1}, {LONG_MAX, 1}, {LONG_MAX - 5, 5}, {20480, 16384} };
	for (int m = 0; m < sizeof modes / sizeof *modes; m++) {
		OPEN(fd, open("e", O_RDWR | O_CREAT | O_TRUNC, 0644));
		for (int i = 0; i < 40000; i++)
			buf[i] = (char)(i * 5 + i / 253 + 1);
		printf("%ld\n", (long)write(fd, buf, 40000));
		reader = dup(fd);
		for (int r = 0; r < sizeof ranges / sizeof *ranges; r++) {
			printf("mode %x, range %ld %ld\n", modes[m], ranges[r][0], ranges[r][1]);
			SAY(pread(reader, buf, sizeof buf, 0));
			SAY(r % 2 ? fallocate(fd, modes[m], ranges[r][0], ranges[r][1])
				: fallocate64(fd, modes[m], ranges[r][0], ranges[r][1]));
			size(fd); position(fd);
			SAY(pread(reader, buf, sizeof buf, 0)); SAY(pread(fd, buf, 5000, 4000));
		}
		/* In reserved space, pages in the kernel's cache count as data, so the result varies. */
		for (long at = 0; m == 2 && at >= 0 && at < 80000;) {
			SAY(lseek(reader, at, SEEK_HOLE)); SAY(at = lseek64(reader, at, SEEK_DATA)); position(reader);
			at = at < 0 ? at : lseek(fd, at, SEEK_HOLE);
		}
		SAY(syscall(SYS_fallocate, fd, modes[m], 100L, 5000L)); SAY(pread(reader, buf, sizeof buf, 0));
		SAY(posix_fallocate(fd, 100, 50)); SAY(posix_fallocate64(fd, 41000, 500)); size(reader);
		SAY(posix_fallocate(fd, -1, 5)); SAY(posix_fallocate(fd, 5, 0)); SAY(posix_fallocate(fd, LONG_MAX, 5));
		SAY(posix_fallocate(999, 0, 5)); SAY(fallocate(999, 0, 0, 5)); SAY(pread(fd, buf, sizeof buf, 0));
		SAY(ftruncate(fd, 5001)); SAY(fallocate(fd, modes[2], 5000, 1)); SAY(pread(reader, buf, 9000, 0));
		SAY(fallocate(fd, 0, 0, 9000)); SAY(pread(reader, buf, 9000, 0)); close(fd); close(reader);
		OPEN(reader, open("e", O_RDONLY)); SAY(pread(reader, buf, 100, 0));
		SAY(fallocate(reader, modes[m], 0, 100)); SAY(posix_fallocate(reader, 0, 100)); close(reader);
		contents("e");
	}
}

static void kernel_calls(void)
{
	int fd, to, p[2];
	off_t off = 10, toff = 100;
	OPEN(fd, open("a", O_RDONLY)); OPEN(to, open("c", O_RDWR | O_CREAT | O_TRUNC, 0644));
	SAY(sendfile(to, fd, &off, 3000)); printf("%ld\n", (long)off); position(to);
	SAY(sendfile64(to, fd, NULL, 500)); position(fd); position(to);
	long left = 20000, n;
	while (left > 0 && (n = copy_file_range(fd, NULL, to, NULL, left, 0)) > 0)
		left -= n;
	printf("left %ld\n", left); position(fd); position(to);
	SAY(copy_file_range(fd, &off, to, &toff, 100, 0)); printf("%ld %ld\n", (long)off, (long)toff);
	SAY(copy_file_range(fd, NULL, to, NULL, 10, 1)); SAY(pread(to, buf, 40000, 0));
	close(fd); close(to); contents("c");
	OPEN(fd, open("c", O_RDWR)); SAY(pread(fd, buf, 100, 0)); SAY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
	SAY(pread(fd, buf, 8192, 0)); SAY(fallocate64(fd, 0, 0, 50000)); size(fd); SAY(pread(fd, buf, 65536, 0));
	SAY(posix_fallocate(fd, 0, 60000)); size(fd); SAY(posix_fallocate64(fd, 0, 61000)); size(fd);
	SAY(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED)); SAY(pread(fd, buf, 100, 5000)); close(fd);
	pipe(p);
	OPEN(fd, open("a", O_RDWR)); SAY(read(fd, buf, 10)); SAY(splice(fd, NULL, p[1], NULL, 100, 0));
	position(fd); SAY(read(p[0], buf, 100)); SAY(write(p[1], "spliced", 7)); SAY(splice(p[0], NULL, fd, NULL, 7, 0));
	position(fd); SAY(pread(fd, buf, 200, 0)); close(fd);
	OPEN(fd, open("c", O_RDWR)); SAY(pread(fd, buf, 100, 0)); SAY(dprintf(fd, "number %d %.2f\n", 5, 2.5)); position(fd);
	SAY(pread(fd, buf, 100, 0)); close(fd);
	OPEN(fd, open("c", O_RDWR)); SAY(pread(fd, buf, 100, 0));
	char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	memcpy(map, "mapped", 6); SAY(pread(fd, buf, 100, 0)); SAY(pwrite(fd, "written", 7, 10));
	memcpy(buf, map, 100); printf("map %08x\n", hash(buf, 100)); munmap(map, 8192); close(fd);
	OPEN(fd, open("c", O_RDWR)); SAY(pread(fd, buf, 100, 0)); map = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, fd, 0);
	SAY(pwrite(fd, "private", 7, 20)); memcpy(buf, map, 100); printf("map %08x\n", hash(buf, 100));
	munmap(map, 8192); close(fd);
}

static void by_number(void)
{
	int fd = syscall(SYS_openat, AT_FDCWD, "a", O_RDWR);
	printf("fd %d\n", fd);
	SAY(syscall(SYS_read, fd, buf, 100)); SAY(syscall(SYS_pread64, fd, buf, 100, 5L)); position(fd);
	SAY(syscall(SYS_pwrite64, fd, "N", 1, 7L)); SAY(syscall(SYS_write, fd, "M", 1)); SAY(pread(fd, buf, 200, 0));
	SAY(syscall(SYS_lseek, fd, 9L, SEEK_SET)); SAY(syscall(SYS_read, -1, buf, 1)); SAY(syscall(SYS_dup, fd));
	SAY(syscall(SYS_close, fd)); SAY(read(fd, buf, 1)); SAY(open("w", O_RDONLY)); SAY(read(fd, buf, 10));
	SAY(syscall(SYS_close_range, 3, 100, 0)); SAY(read(fd, buf, 1)); SAY(syscall(SYS_getppid) > 0); SAY(syscall(-1));
}

static int visit(const char *path, const struct stat *st, int kind)
{
	if (kind == FTW_F)
		sizes += st->st_size;
	return 0;
}

static int visit_more(const char *path, const struct stat *st, int kind, struct FTW *place)
{
	return visit(path, st, kind);
}

/* Functions that inspect files, write them or pass them on inside libc. */
static void inside_libc(void)
{
	int fd, status;
	char *const here[] = { "tree", NULL };
	FTSENT *entry;
	wordexp_t words;
	void *frames[1] = { (void *)visit };
	mkdir("tree", 0755);
	OPEN(fd, open("tree/f", O_RDWR | O_CREAT | O_TRUNC, 0644));
	SAY(write(fd, buf, 5000)); sizes = 0; SAY(ftw("tree", visit, 5)); printf("%ld\n", sizes);
	SAY(write(fd, buf, 3000)); sizes = 0; SAY(nftw("tree", visit_more, 5, FTW_PHYS)); printf("%ld\n", sizes);
	SAY(write(fd, buf, 2000)); sizes = 0;
	FTS *tree = fts_open(here, FTS_PHYSICAL, NULL);
	while ((entry = fts_read(tree)))
		if (entry->fts_info == FTS_F)
			sizes += entry->fts_statp->st_size;
	fts_close(tree);
	printf("%ld\n", sizes); SAY(lchmod("tree/f", 0600)); SAY(lchmod("none", 0600));
	SAY(lseek(fd, 100, SEEK_SET)); SAY(pread(fd, buf, 300, 0)); backtrace_symbols_fd(frames, 1, fd);
	/* The rest of the output is an address, which varies. */
	SAY(lseek(fd, 0, SEEK_CUR) > 110); SAY(ftruncate(fd, 110)); SAY(pread(fd, buf, 200, 0)); close(fd);
	OPEN(fd, open("a", O_RDONLY)); SAY(read(fd, buf, 10)); sprintf(buf, "$(head -c 4096 <&%d | wc -c)", fd);
	printf("%d", wordexp(buf, &words, 0)); printf(" %s\n", words.we_wordv[0]); wordfree(&words);
	SAY(read(fd, buf, 10)); position(fd); close(fd);
	OPEN(fd, open("a", O_RDONLY)); SAY(read(fd, buf, 10));
	pid_t child = _Fork();
	if (child == 0)
		_exit(syscall(SYS_lseek, fd, 5L, SEEK_CUR) == 15 ? 7 : 8);
	waitpid(child, &status, 0);
	printf("child %d\n", WEXITSTATUS(status)); position(fd); SAY(read(fd, buf, 10)); close(fd);
	FILE *(*open_stream)(const char *, const char *) = dlsym(RTLD_DEFAULT, "_IO_fopen");
	int (*close_stream)(FILE *) = dlsym(RTLD_DEFAULT, "_IO_fclose");
	FILE *f = open_stream("tree/f", "r+");
	printf("%zu ", fread(buf, 1, 50, f)); printf("%d %ld\n", fputs("old name", f), ftell(f));
	printf("%d\n", close_stream(f)); contents("tree/f");
}

static void streams(void)
{
	FILE *f = fopen("s", "w+");
	printf("fileno %d %d\n", fileno(f), fileno_unlocked(f));
	memset(buf, 'q', sizeof buf);
	printf("%d\n", fprintf(f, "line %d\n", 1)); printf("%zu\n", fwrite(buf, 1, 20000, f));
	printf("%ld\n", ftell(f)); printf("%d\n", fseek(f, 5, SEEK_SET));
	printf("%d\n", fgetc(f)); printf("%d\n", ungetc('u', f)); printf("%ld\n", ftell(f));
	printf("%s", fgets(buf, 10, f)); fputs("over", f); fflush(f); rewind(f);
	memset(buf, 0, sizeof buf); printf("%zu\n", fread(buf, 1, 30000, f)); printf("%08x\n", hash(buf, 30000));
	printf("%d %d\n", feof(f), ferror(f)); printf("%d\n", fclose(f)); contents("s");
	f = fopen64("s", "r"); printf("%d\n", setvbuf(f, NULL, _IONBF, 0)); printf("%d\n", getc(f));
	printf("%ld\n", (long)lseek(fileno(f), 0, SEEK_CUR)); printf("%d\n", fputc('x', f)); printf("err %d\n", ferror(f) != 0);
	f = freopen("s", "a", f); printf("%d\n", fprintf(f, "appended")); printf("%d\n", fclose(f)); contents("s");
	f = fopen("none", "r"); printf("%p %d\n", (void *)f, errno); f = fopen("s", "q"); printf("%p %d\n", (void *)f, errno);
	f = fopen("s", "wx"); printf("%p %d\n", (void *)f, errno); f = fopen(".", "r"); printf("%d\n", f ? getc(f) : 0);
	if (f) fclose(f);
	int fd = open("s", O_RDWR); f = fdopen(fd, "r+"); printf("%d %d\n", fd, fileno(f)); char *line = NULL; size_t cap = 0;
	printf("%zd %s", getline(&line, &cap, f), line); printf("%ld\n", ftell(f)); fseek(f, 0, SEEK_END);
	fputs("E\n", f); fclose(f); printf("%d\n", (int)read(fd, buf, 1)); contents("s");
	f = fopen("s", "r"); int ch, count = 0; while ((ch = getc_unlocked(f)) != EOF) count += ch; printf("%d\n", count); fclose(f);
	f = fopen("s", "a+"); printf("%ld\n", ftell(f)); fputs("plus", f); fseek(f, 0, SEEK_SET); printf("%d\n", getc(f)); fclose(f); contents("s");
	f = fopen("left_open", "w"); fputs("written at exit", f);
}

int main(void)
{
	umask(022);
	setvbuf(stdout, NULL, _IOLBF, 0);
	opens();
	reads();
	writes();
	offsets();
	extents();
	kernel_calls();
	by_number();
	inside_libc();
	streams();
	return 0;
}
