/* page_cache SCENARIO: files that are read from the kernel's page cache, in the current directory.

   Each scenario has the same results with the library and without it, except `whole`: without the library reads may
   be torn. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "check.h"

enum { BLOCK = 8 * PAGE, BLOCKS = 64, SIZE = BLOCK * BLOCKS };

static char buffer[SIZE];

static int make(const char *name, size_t size)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	for (size_t at = 0; at < size; at++)
		buffer[at] = 'a' + at / PAGE % 26;
	CHECK(write(fd, buffer, size) == (ssize_t)size);
	return fd;
}

/* Reads often enough for the file to be mapped. */
static void warm(int fd, size_t size)
{
	char page[PAGE];
	for (int round = 0; round < 200; round++) {
		off_t at = (off_t)(round % (size / PAGE)) * PAGE;
		CHECK(pread(fd, page, PAGE, at) == PAGE);
	}
}

static unsigned next(unsigned *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

/* Readers concurrent with writers of blocks that hold one number: by any call, by any descriptor. */
static int read_fd, write_fd;
static atomic_int is_over;
static atomic_long torn, reads;

static void *read_blocks(void *argument)
{
	unsigned state = (unsigned)(intptr_t)argument * 7919 + 1;
	uint64_t *words = aligned_alloc(PAGE, BLOCK);
	while (!is_over) {
		off_t at = (off_t)(next(&state) % 4) * BLOCK;
		struct iovec halves[2] = {{words, BLOCK / 2}, {(char *)words + BLOCK / 2, BLOCK / 2}};
		if (next(&state) % 4)
			CHECK(pread(read_fd, words, BLOCK, at) == BLOCK);
		else
			CHECK(preadv(read_fd, halves, 2, at) == BLOCK);
		for (int at = 1; at < BLOCK / 8; at++)
			if (words[at] != words[0]) {
				torn++;
				break;
			}
		reads++;
	}
	return NULL;
}

static void *write_blocks(void *argument)
{
	unsigned state = (unsigned)(intptr_t)argument * 104729 + 1;
	uint64_t *words = aligned_alloc(PAGE, BLOCK);
	int fd = open("blocks", O_RDWR);
	CHECK(fd >= 0);
	for (unsigned round = 0; !is_over; round++) {
		uint64_t value = (uint64_t)next(&state) << 32 | next(&state);
		for (int at = 0; at < BLOCK / 8; at++)
			words[at] = value;
		off_t at = (off_t)(next(&state) % 4) * BLOCK;
		struct iovec halves[2] = {{words, BLOCK / 2}, {(char *)words + BLOCK / 2, BLOCK / 2}};
		switch (round % 3) {
		case 0: CHECK(pwrite(write_fd, words, BLOCK, at) == BLOCK); break;
		case 1: CHECK(pwritev(fd, halves, 2, at) == BLOCK); break;
		case 2:
			CHECK(lseek(fd, at, SEEK_SET) == at);
			CHECK(write(fd, words, BLOCK) == BLOCK);
		}
	}
	return NULL;
}

static void whole(void)
{
	pthread_t threads[6];
	memset(buffer, 0, SIZE);
	write_fd = open("blocks", O_RDWR | O_CREAT, 0644);
	CHECK(write(write_fd, buffer, SIZE) == SIZE);
	read_fd = open("blocks", O_RDONLY);
	warm(read_fd, SIZE);
	for (intptr_t at = 0; at < 6; at++)
		CHECK(!pthread_create(&threads[at], NULL, at % 2 ? read_blocks : write_blocks, (void *)at));
	sleep(2);
	is_over = 1;
	for (int at = 0; at < 6; at++)
		pthread_join(threads[at], NULL);
	printf("torn %ld\n", (long)torn);
	CHECK(reads > 100);
}

/* Another process cuts the file and makes it longer again: each read has the length and bytes of one moment. */
static void cut_by_others(void)
{
	int fd = make("cut", SIZE);
	warm(fd, SIZE);
	for (unsigned round = 0, state = 1; round < 200; round++) {
		off_t size = next(&state) % SIZE, grown = size + next(&state) % (SIZE - size + 1);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			/* By the file's path: the parent's descriptors are not involved. */
			CHECK(truncate("cut", size) == 0 && truncate("cut", grown) == 0);
			_exit(0);
		}
		int status;
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		for (int look = 0; look < 20; look++) {
			off_t at = next(&state) % SIZE;
			size_t len = next(&state) % (3 * PAGE) + 1;
			static char bytes[3 * PAGE + 1];
			ssize_t got = pread(fd, bytes, len, at);
			CHECK(got == (at >= grown ? 0 : (ssize_t)(len < (size_t)(grown - at) ? len : grown - at)));
			for (ssize_t byte = 0; byte < got; byte++)
				CHECK(bytes[byte] == (at + byte >= size ? 0 : 'a' + (at + byte) / PAGE % 26));
		}
		CHECK(pwrite(fd, buffer, SIZE, 0) == SIZE);
		warm(fd, SIZE);
	}
}

/* A mapping of another process stores bytes past the end, in the file's last page: no read returns them. */
static void scribbled(void)
{
	int fd = make("scribbled", 3 * PAGE + 100);
	warm(fd, 3 * PAGE);
	pid_t child = fork();
	if (child == 0) {
		int own = open("scribbled", O_RDWR);
		char *map = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
		CHECK(map != MAP_FAILED);
		memset(map + 3 * PAGE + 100, 'X', 500);
		map[10] = '!';
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	char bytes[2 * PAGE];
	CHECK(pread(fd, bytes, sizeof bytes, 2 * PAGE) == PAGE + 100);
	CHECK(pread(fd, bytes, sizeof bytes, 3 * PAGE) == 100);
	CHECK(pread(fd, bytes, 10, 3 * PAGE + 100) == 0);
	CHECK(pread(fd, bytes, PAGE, 0) == PAGE && bytes[10] == '!');
}

/* A jump out of a handler abandons a write: its page can be read at once, and written. */
static sigjmp_buf home;
static volatile int jumps;

void __longjmp_chk(struct __jmp_buf_tag *, int) __attribute__((noreturn));

static void jump(int signal)
{
	switch (jumps++ % 4) {
	case 0: siglongjmp(home, 1);
	case 1: longjmp(home, 1);
	case 2: _longjmp(home, 1);
	default: __longjmp_chk(home, 1);
	}
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void jumped(void)
{
	int fd = make("jumped", SIZE);
	warm(fd, SIZE);
	/* Some of these jumps do not restore the mask. */
	struct sigaction action = {.sa_handler = jump, .sa_flags = SA_NODEFER};
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	struct itimerval often = {{0, 300}, {0, 300}}, never = {0};
	volatile unsigned state = 1;
	if (sigsetjmp(home, 1) == 0)
		setitimer(ITIMER_REAL, &often, NULL);
	while (jumps < 400) {
		unsigned now = state;
		CHECK(pwrite(fd, buffer, PAGE, (off_t)(next(&now) % 16) * PAGE) == PAGE);
		state = now;
	}
	setitimer(ITIMER_REAL, &never, NULL);
	double begin = seconds();
	warm(fd, SIZE);
	CHECK(pwrite(fd, buffer, SIZE, 0) == SIZE);
	/* A page that stayed busy would cost a second. */
	CHECK(seconds() - begin < 0.9);
}

/* A handler that has interrupted a write reads and writes the same bytes. */
static int handler_fd;
static volatile int handled;

static void use_file(int signal)
{
	char page[PAGE];
	CHECK(pread(handler_fd, page, PAGE, 0) == PAGE);
	CHECK(pwrite(handler_fd, page, PAGE, 0) == PAGE);
	handled++;
}

static void in_handler(void)
{
	handler_fd = make("handler", SIZE);
	warm(handler_fd, SIZE);
	struct sigaction action = {.sa_handler = use_file};
	sigfillset(&action.sa_mask);
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	struct sigaction told;
	CHECK(sigaction(SIGALRM, NULL, &told) == 0);
	CHECK(sigismember(&told.sa_mask, SIGBUS) == 1 && sigismember(&told.sa_mask, SIGSEGV) == 1);
	struct itimerval often = {{0, 200}, {0, 200}}, never = {0};
	setitimer(ITIMER_REAL, &often, NULL);
	while (handled < 500)
		CHECK(pwrite(handler_fd, buffer, 4 * PAGE, 0) == 4 * PAGE);
	setitimer(ITIMER_REAL, &never, NULL);
}

/* A thread that blocks all signals reads a file that is cut during the read. */
static void *read_cut(void *by_number)
{
	sigset_t all;
	sigfillset(&all);
	if (by_number)
		CHECK(syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, 8) == 0);
	else
		CHECK(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
	char page[PAGE];
	while (!is_over) {
		ssize_t got = pread(read_fd, page, PAGE, SIZE - PAGE);
		CHECK(got == 0 || got == PAGE);
	}
	return NULL;
}

static void blocked(void)
{
	read_fd = make("blocked", SIZE);
	warm(read_fd, SIZE);
	pthread_t threads[2];
	CHECK(!pthread_create(&threads[0], NULL, read_cut, NULL));
	CHECK(!pthread_create(&threads[1], NULL, read_cut, threads));
	for (int round = 0; round < 2000; round++) {
		CHECK(truncate("blocked", 0) == 0);
		CHECK(truncate("blocked", SIZE) == 0);
	}
	is_over = 1;
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
}

/* The offset of one description, with all the ways to move it or to share it. */
static void offsets(void)
{
	char page[PAGE];
	int fd = make("offsets", SIZE);
	CHECK(lseek(fd, 0, SEEK_SET) == 0);
	for (int at = 0; at < 100; at++)
		CHECK(read(fd, page, PAGE) == PAGE && page[0] == 'a' + at % 26);
	CHECK(lseek(fd, 0, SEEK_CUR) == 100 * PAGE);
	CHECK(write(fd, buffer, 10) == 10 && lseek(fd, 0, SEEK_CUR) == 100 * PAGE + 10);
	CHECK(read(fd, page, PAGE - 10) == PAGE - 10 && page[0] == 'a' + 100 % 26);
	int other = dup(fd);
	CHECK(read(fd, page, PAGE) == PAGE && read(other, page, PAGE) == PAGE && page[0] == 'a' + 102 % 26);
	close(other);
	int again = open("offsets", O_RDONLY);
	for (int at = 0; at < 80; at++)
		CHECK(read(again, page, PAGE) == PAGE);
	pid_t child = fork();
	if (child == 0) {
		CHECK(read(again, page, PAGE) == PAGE && page[0] == 'a' + 80 % 26);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(read(again, page, PAGE) == PAGE && page[0] == 'a' + 81 % 26);
	CHECK(close(again) == 0);
	again = open("offsets", O_RDONLY);
	for (int at = 0; at < 80; at++)
		CHECK(read(again, page, PAGE) == PAGE);
	/* The new program's standard input. */
	if ((child = fork()) == 0) {
		dup2(again, 0);
		execlp("sh", "sh", "-c", "head -c 1 | grep -q c", NULL);
		_exit(9);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(lseek(fd, 0, SEEK_END) == SIZE && read(fd, page, 1) == 0);
	CHECK(lseek(fd, -1, SEEK_SET) == -1 && errno == EINVAL);
	CHECK(pread(fd, page, PAGE, INT64_MAX - PAGE) == 0 || errno == EINVAL);
	CHECK(pread(fd, page, PAGE, -1) == -1 && errno == EINVAL);
	CHECK(pread(fd, NULL, PAGE, 0) == -1 && errno == EFAULT);
	CHECK(pread(fd, (void *)8, PAGE, 0) == -1 && errno == EFAULT);
	int output = open("offsets", O_WRONLY);
	CHECK(pread(output, page, PAGE, 0) == -1 && errno == EBADF);
	CHECK(close(fd) == 0 && pread(fd, page, PAGE, 0) == -1 && errno == EBADF);
}

static int entries(const char *path)
{
	DIR *dir = opendir(path);
	int count = 0;
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

/* The library's use of the process's resources: prints the threads and descriptors; the lock of the file ends at the
   close. */
static void alone(void)
{
	int fd = make("alone", SIZE);
	warm(fd, SIZE);
	CHECK(flock(fd, LOCK_EX) == 0);
	printf("threads %d\n", entries("/proc/self/task") - 2);
	int again = open("alone", O_RDWR | O_NONBLOCK);
	CHECK(again >= 0 && flock(again, LOCK_EX | LOCK_NB) == -1);
	warm(again, SIZE);
	CHECK(close(fd) == 0 && flock(again, LOCK_EX | LOCK_NB) == 0);
	fd = open("alone", O_RDONLY);
	warm(fd, SIZE);
	CHECK(close(again) == 0);
	/* The file's space is freed, too. */
	CHECK(unlink("alone") == 0);
	warm(fd, SIZE);
	CHECK(dup2(1, fd) == fd);
	char maps[1 << 16] = "", *at = maps;
	int list = open("/proc/self/maps", O_RDONLY);
	ssize_t got;
	while ((got = read(list, at, maps + sizeof maps - 1 - at)) > 0)
		at += got;
	CHECK(!strstr(maps, "alone"));
}

/* Limits that leave no room for a mapping, and memory that is locked. */
static void limited(int resource)
{
	if (resource >= 0) {
		struct rlimit limit = {1 << 30, 1 << 30};
		CHECK(setrlimit(resource, &limit) == 0);
	} else {
		CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
	}
	int fd = make("limited", SIZE);
	warm(fd, SIZE);
	truncate("limited", PAGE);
	char page[PAGE];
	CHECK(pread(fd, page, PAGE, 0) == PAGE && pread(fd, page, PAGE, PAGE) == 0);
}

/* The pages of a file that the kernel has in its cache. */
static int cached_pages(int fd)
{
	unsigned char pages[SIZE / PAGE];
	int count = 0;
	void *map = mmap(NULL, SIZE, PROT_NONE, MAP_SHARED, fd, 0);
	CHECK(map != MAP_FAILED && mincore(map, SIZE, pages) == 0);
	for (int page = 0; page < SIZE / PAGE; page++)
		count += pages[page] & 1;
	CHECK(munmap(map, SIZE) == 0);
	return count;
}

/* The program asks the kernel to drop pages, by the descriptor that reads them, by another one, and by number. */
static void dropped(void)
{
	int fd = make("dropped", SIZE), other = open("dropped", O_RDONLY);
	CHECK(fsync(fd) == 0);
	for (int way = 0; way < 3; way++) {
		warm(fd, SIZE);
		CHECK(cached_pages(fd) > 0);
		errno = 77;
		if (way == 2)
			CHECK(syscall(SYS_fadvise64, other, (off_t)0, (off_t)SIZE, POSIX_FADV_DONTNEED) == 0);
		else
			CHECK(posix_fadvise(way ? other : fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
		CHECK(errno == 77);
		printf("%d cached\n", cached_pages(fd));
	}
	CHECK(posix_fadvise(-1, 0, 0, POSIX_FADV_DONTNEED) == EBADF);
	CHECK(posix_fadvise(fd, 0, -1, POSIX_FADV_DONTNEED) == EINVAL);
	CHECK(posix_fadvise(fd, PAGE, 1, POSIX_FADV_DONTNEED) == 0);
	CHECK(posix_fadvise(fd, INT64_MAX, INT64_MAX, POSIX_FADV_DONTNEED) == 0);
	char page[PAGE];
	for (int at = 0; at < SIZE / PAGE; at++)
		CHECK(pread(fd, page, PAGE, (off_t)at * PAGE) == PAGE && page[PAGE - 1] == 'a' + at % 26);
}

/* More files than the library maps at a time, and a number beyond those that it knows. */
static void many(void)
{
	enum { FILES_MAX = 4500, HIGH = 70000 };
	static int fds[FILES_MAX];
	struct rlimit limit;
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = limit.rlim_max;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	const int files = limit.rlim_max < FILES_MAX + 100 ? (int)limit.rlim_max - 100 : FILES_MAX;
	printf("%d files\n", files);
	char name[30], page[PAGE], expected[PAGE];
	for (int file = 0; file < files; file++) {
		sprintf(name, "many-%d", file);
		fds[file] = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
		memset(expected, 'a' + file % 26, PAGE);
		CHECK(fds[file] >= 0 && write(fds[file], expected, PAGE) == PAGE && write(fds[file], expected, PAGE) == PAGE);
		CHECK(unlink(name) == 0);
	}
	for (int file = 0; file < files; file++) {
		memset(expected, 'a' + file % 26, PAGE);
		for (int read = 0; read < 70; read++)
			CHECK(pread(fds[file], page, PAGE, read % 2 * PAGE) == PAGE && !memcmp(page, expected, PAGE));
		CHECK(pwrite(fds[file], "new", 3, 10) == 3);
		CHECK(pread(fds[file], page, PAGE, 0) == PAGE && !memcmp(page + 10, "new", 3) && page[13] == expected[0]);
	}
	if (limit.rlim_max <= HIGH)
		return;
	int high = fcntl(fds[0], F_DUPFD, HIGH);
	CHECK(high == HIGH && pwrite(high, "high", 4, 100) == 4);
	for (int read = 0; read < 70; read++)
		CHECK(pread(high, page, PAGE, 0) == PAGE && !memcmp(page + 100, "high", 4));
	CHECK(pread(fds[0], page, PAGE, 0) == PAGE && !memcmp(page + 100, "high", 4));
	CHECK(lseek(high, 5, SEEK_SET) == 5 && read(fds[0], page, 1) == 1 && lseek(high, 0, SEEK_CUR) == 6);
}

int main(int argc, char **argv)
{
	if (!strcmp(argv[1], "whole")) whole();
	else if (!strcmp(argv[1], "cut")) cut_by_others();
	else if (!strcmp(argv[1], "scribbled")) scribbled();
	else if (!strcmp(argv[1], "jumped")) jumped();
	else if (!strcmp(argv[1], "handler")) in_handler();
	else if (!strcmp(argv[1], "blocked")) blocked();
	else if (!strcmp(argv[1], "offsets")) offsets();
	else if (!strcmp(argv[1], "many")) many();
	else if (!strcmp(argv[1], "dropped")) dropped();
	else if (!strcmp(argv[1], "alone")) alone();
	else if (!strcmp(argv[1], "address-space")) limited(RLIMIT_AS);
	else if (!strcmp(argv[1], "locked")) limited(-1);
	else return 2;
	return 0;
}
