/* POSIX locks on a file that the process has open several times. One scenario each, by name. Prints nothing and
   returns 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

/* ---- another process, without hooks ---- */

struct wish {
	char what;
	short type;
	off_t start, len;
};

static int ask[2], answer[2];

static long raw(long number, long a, long b, long c)
{
	long result;
#ifdef __x86_64__
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
#else
	result = syscall(number, a, b, c);
#endif
	return result;
}

static void be_other(void)
{
	struct wish wish;
	int fd = -1;
	while (read(ask[0], &wish, sizeof wish) == sizeof wish) {
		struct flock lock = {.l_type = wish.type, .l_start = wish.start, .l_len = wish.len};
		long result = 0;
		char told = '-';
		if (wish.what == 'o')
			fd = raw(SYS_openat, AT_FDCWD, (long)"f", O_RDWR);
		else if (wish.what == 'c')
			raw(SYS_close, fd, 0, 0);
		else if (wish.what == 'g') {
			CHECK(raw(SYS_fcntl, fd, F_GETLK, (long)&lock) == 0);
			told = lock.l_type == F_UNLCK ? '-' : lock.l_type == F_RDLCK ? 'R' : 'W';
		} else {
			result = raw(SYS_fcntl, fd, wish.what == 'w' ? F_SETLKW : F_SETLK, (long)&lock);
			told = result == 0 ? '+' : 'x';
		}
		CHECK(write(answer[1], &told, 1) == 1);
	}
	_exit(0);
}

static void start_other(void)
{
	CHECK(pipe(ask) == 0 && pipe(answer) == 0);
	if (fork() == 0) {
		close(ask[1]);
		be_other();
	}
	close(ask[0]);
	close(answer[1]);
}

static void wish(char what, short type, off_t start, off_t len)
{
	struct wish wish = {what, type, start, len};
	CHECK(write(ask[1], &wish, sizeof wish) == sizeof wish);
}

static char told(void)
{
	char told;
	CHECK(read(answer[0], &told, 1) == 1);
	return told;
}

static char other(char what, short type, off_t start, off_t len)
{
	wish(what, type, start, len);
	return told();
}

/* The lock that the other process finds for a write at this byte. */
static char seen(off_t at)
{
	return other('g', F_WRLCK, at, 1);
}

/* ---- this process ---- */

enum { ENDS = 4 };

static int ends[ENDS];

static int lock_at(int fd, int command, int type, int whence, off_t start, off_t len)
{
	struct flock lock = {.l_type = type, .l_whence = whence, .l_start = start, .l_len = len};
	return fcntl(fd, command, &lock);
}

static int set(int fd, int type, off_t start, off_t len)
{
	return lock_at(fd, F_SETLK, type, SEEK_SET, start, len);
}

static void open_ends(void)
{
	static const int flags[ENDS] = {O_RDWR, O_RDWR | O_NOFOLLOW | O_CREAT, O_RDONLY, O_WRONLY};
	for (int i = 0; i < ENDS; i++)
		CHECK((ends[i] = open("f", flags[i] | O_CLOEXEC, 0644)) >= 0);
}

static void close_ends(void)
{
	for (int i = 0; i < ENDS; i++)
		CHECK(close(ends[i]) == 0);
}

/* Reads many times. */
static void heat(int times)
{
	char page[PAGE];
	for (int i = 0; i < times; i++)
		CHECK(pread(ends[i % 3], page, PAGE, (i % 16) * PAGE) == PAGE && is_all(page, PAGE, i % 16));
}

/* ---- kept: other processes find the locks that were taken, through each change of the file's state ---- */

static void kept(int times)
{
	make_pages("f", 0);
	start_other();
	for (int i = 0; i < times; i++) {
		if (i > 0)
			close_ends();
		open_ends();
		CHECK(set(ends[0], F_RDLCK, 10, 1) == 0 && set(ends[2], F_RDLCK, 1000, 0) == 0);
		heat(4000);
		CHECK(other('o', 0, 0, 0) == '-' && seen(10) == 'R' && seen(999) == '-' && seen(5000) == 'R');
		CHECK(other('s', F_WRLCK, 10, 1) == 'x' && other('s', F_RDLCK, 10, 1) == '+');
		CHECK(set(ends[1], F_WRLCK, 10, 1) == -1 && other('s', F_UNLCK, 10, 1) == '+');
		/* Unlocks without a close, which would end the locks of other descriptors. */
		heat(10);
		CHECK(seen(10) == 'R' && other('c', 0, 0, 0) == '-');
	}
	heat(8000);
	/* A write lock while the file is served; then another process opens the file. */
	CHECK(set(ends[3], F_WRLCK, 20, 5) == 0 && other('o', 0, 0, 0) == '-');
	CHECK(seen(20) == 'W' && seen(24) == 'W' && seen(25) == '-' && seen(10) == 'R' && seen(2000) == 'R');
	heat(100);
	CHECK(set(ends[0], F_UNLCK, 20, 5) == 0 && seen(20) == '-' && seen(10) == 'R' && other('c', 0, 0, 0) == '-');
	heat(60000);
	/* A child has no locks, and its closes end none. */
	int status;
	pid_t child = fork();
	if (child == 0) {
		struct flock lock = {.l_type = F_WRLCK, .l_start = 10, .l_len = 1};
		CHECK(fcntl(ends[0], F_GETLK, &lock) == 0 && lock.l_type == F_RDLCK && lock.l_pid == getppid());
		close_ends();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(other('o', 0, 0, 0) == '-' && seen(10) == 'R' && seen(5000) == 'R');
	/* Any close ends all locks. */
	CHECK(close(ends[3]) == 0 && seen(10) == '-' && seen(5000) == '-');
	CHECK(set(ends[0], F_RDLCK, 10, 1) == 0 && seen(10) == 'R');
	CHECK((ends[3] = dup(ends[0])) >= 0 && seen(10) == 'R' && close(ends[3]) == 0 && seen(10) == '-');
	CHECK(other('c', 0, 0, 0) == '-' && (ends[3] = open("f", O_WRONLY)) >= 0);
	close_ends();
}

/* ---- closed: each close of a descriptor of a served file ends the locks ---- */

static void closed(int times)
{
	make_pages("f", 0);
	start_other();
	for (int i = 0; i < times; i++) {
		open_ends();
		heat(3000);
		CHECK(set(ends[i % 3], F_RDLCK, 7, 3) == 0);
		heat(100);
		int by_dup = i % 2, gone = (i / 2) % ENDS;
		if (by_dup)
			CHECK(dup2(1, ends[gone]) == ends[gone]);
		else
			CHECK(close(ends[gone]) == 0);
		CHECK(other('o', 0, 0, 0) == '-' && seen(8) == '-' && other('c', 0, 0, 0) == '-');
		if (!by_dup)
			CHECK(dup2(1, ends[gone]) == ends[gone]);
		close_ends();
	}
}

/* ---- rights: each descriptor has its own rights, and its own offset ---- */

static void rights(void)
{
	make_pages("f", 0);
	start_other();
	open_ends();
	for (int i = 0; i < 3; i++) {
		heat(i == 1 ? 4000 : 1);
		CHECK(set(ends[2], F_WRLCK, 1, 1) == -1 && errno == EBADF);
		CHECK(set(ends[3], F_RDLCK, 1, 1) == -1 && errno == EBADF);
		CHECK(set(ends[2], F_UNLCK, 1, 1) == 0 && set(ends[3], F_UNLCK, 1, 1) == 0);
		CHECK(fcntl(ends[0], F_SETLK, NULL) == -1 && errno == EFAULT);
		CHECK(set(ends[0], 77, 1, 1) == -1 && errno == EINVAL);
		CHECK(set(ends[0], F_RDLCK, -5, 1) == -1 && errno == EINVAL);
		CHECK(lseek(ends[0], 100, SEEK_SET) == 100 && lseek(ends[3], 300, SEEK_SET) == 300);
		CHECK(lock_at(ends[0], F_SETLK, F_RDLCK, SEEK_CUR, 5, 1) == 0);
		CHECK(lock_at(ends[3], F_SETLKW, F_WRLCK, SEEK_CUR, -5, 5) == 0);
		CHECK(lock_at(ends[1], F_SETLK, F_RDLCK, SEEK_END, -1, 1) == 0);
		CHECK(lockf(ends[3], F_TEST, 10) == 0 && lockf(ends[3], F_LOCK, 10) == 0);
		CHECK(lockf(ends[2], F_TLOCK, 10) == -1 && errno == EBADF);
		CHECK(lockf(ends[0], 99, 10) == -1 && errno == EINVAL);
		CHECK(other('o', 0, 0, 0) == '-');
		CHECK(seen(104) == '-' && seen(105) == 'R' && seen(106) == '-');
		CHECK(seen(294) == '-' && seen(295) == 'W' && seen(309) == 'W' && seen(310) == '-');
		CHECK(seen(PAGES * PAGE - 2) == '-' && seen(PAGES * PAGE - 1) == 'R' && seen(PAGES * PAGE) == '-');
		CHECK(other('s', F_WRLCK, 50, 10) == '+');
		struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_start = -46, .l_len = 1};
		CHECK(fcntl(ends[0], F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK && lock.l_whence == SEEK_SET);
		CHECK(lock.l_start == 50 && lock.l_len == 10 && lock.l_pid != 0 && lock.l_pid != getpid());
		lock = (struct flock){.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_start = 7, .l_len = 1};
		CHECK(fcntl(ends[0], F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK && lock.l_whence == SEEK_CUR);
		CHECK(lock.l_start == 7 && lock.l_len == 1);
		CHECK(lseek(ends[0], 50, SEEK_SET) == 50 && lockf(ends[0], F_TEST, 1) == -1 && errno == EACCES);
		CHECK(lockf(ends[0], F_TLOCK, 1) == -1 && (errno == EACCES || errno == EAGAIN));
		CHECK(other('c', 0, 0, 0) == '-' && lockf(ends[0], F_TEST, 1) == 0);
		CHECK(set(ends[2], F_UNLCK, 0, 0) == 0);
		heat(8000);
	}
	close_ends();
}

/* ---- waits: in the kernel, while the descriptors must share a description; woken, interrupted, cancelled ---- */

static volatile int woken;

static void wake(int signal)
{
	woken++;
}

static void *wait_at(void *end)
{
	long result = lock_at(*(int *)end, F_SETLKW, F_WRLCK, SEEK_SET, 500, 10);
	return (void *)(result == 0 ? 0L : (long)errno);
}

static void waits(int times)
{
	struct sigaction action = {.sa_handler = wake};
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	make_pages("f", 0);
	start_other();
	for (int i = 0; i < times; i++) {
		pthread_t thread;
		void *result;
		open_ends();
		heat(4000);
		int holds = i % 2;
		/* The file is served, and its descriptors can't get separate descriptions. */
		CHECK(!holds || set(ends[1], F_WRLCK, 20, 1) == 0);
		CHECK(other('o', 0, 0, 0) == '-' && other('s', F_WRLCK, 505, 1) == '+');
		CHECK(set(ends[0], F_WRLCK, 500, 10) == -1 && (errno == EAGAIN || errno == EACCES));
		CHECK(pthread_create(&thread, NULL, wait_at, &ends[i % 3 ? 0 : 3]) == 0);
		usleep(20000);
		if (i % 4 == 2) {
			/* During its wait the library must not separate the descriptions. */
			CHECK(!holds || set(ends[1], F_UNLCK, 20, 1) == 0);
			heat(100);
		}
		if (i % 3 == 0) {
			/* Sent repeatedly: the first signal may arrive before the thread waits. */
			do
				pthread_kill(thread, SIGUSR1), usleep(1000);
			while (pthread_tryjoin_np(thread, &result) != 0);
			CHECK(woken > 0 && result == (void *)EINTR);
		} else if (i % 3 == 1) {
			CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
			CHECK(result == PTHREAD_CANCELED);
		} else {
			CHECK(other('u', F_UNLCK, 505, 1) == '+');
			CHECK(pthread_join(thread, &result) == 0 && result == NULL);
			CHECK(seen(500) == 'W' && seen(509) == 'W');
		}
		CHECK(seen(20) == (holds && i % 4 != 2 ? 'W' : '-'));
		CHECK(set(ends[0], F_UNLCK, 0, 0) == 0 && seen(20) == '-' && seen(500) == '-');
		CHECK(other('c', 0, 0, 0) == '-');
		close_ends();
	}
}

/* ---- count: processes and threads increment numbers under locks ---- */

static pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER;
enum { COUNTERS = 3, AT = 64 * PAGE };

static void add(int locker, int reader, int writer, int which)
{
	uint64_t value;
	off_t at = AT + which * 8;
	CHECK(lock_at(locker, F_SETLKW, F_WRLCK, SEEK_SET, at, 8) == 0);
	CHECK(pread(reader, &value, 8, at) == 8);
	value++;
	CHECK(pwrite(writer, &value, 8, at) == 8);
	CHECK(set(locker, F_UNLCK, at, 8) == 0);
}

static void *count_up(void *seed)
{
	unsigned state = (unsigned)(long)seed + 1;
	for (int i = 0; i < 300; i++) {
		state = state * 1103515245 + 12345;
		int which = state >> 16, end = which % 4;
		char page[PAGE];
		for (int j = 0; j < 40; j++)
			CHECK(pread(ends[j % 3], page, PAGE, (j % 16) * PAGE) == PAGE && is_all(page, PAGE, j % 16));
		/* The process owns the locks: its threads exclude each other by a mutex of their own. */
		pthread_mutex_lock(&own);
		add(ends[end == 2 ? 0 : end], ends[which / 4 % 3], ends[which / 16 % 2 ? 3 : 1], which / 64 % COUNTERS);
		pthread_mutex_unlock(&own);
	}
	return NULL;
}

static void count_in_other(void)
{
	for (int i = 0; i < 40; i++) {
		int fd = open("f", O_RDWR);
		CHECK(fd >= 0);
		for (int j = 0; j < 10; j++)
			add(fd, fd, fd, j % COUNTERS);
		CHECK(close(fd) == 0);
		usleep(15000);
	}
	_exit(0);
}

static void count(char **arguments)
{
	make_pages("f", 0);
	int fd = open("f", O_RDWR), status;
	uint64_t values[COUNTERS] = {0};
	CHECK(pwrite(fd, values, sizeof values, AT) == sizeof values && close(fd) == 0);
	pid_t children[2];
	for (int i = 0; i < 2; i++)
		if ((children[i] = fork()) == 0) {
			unsetenv("LD_PRELOAD");
			execl("/proc/self/exe", "shared_locks", "adds", NULL);
			_exit(1);
		}
	open_ends();
	pthread_t threads[3];
	for (long i = 0; i < 3; i++)
		CHECK(pthread_create(&threads[i], NULL, count_up, (void *)i) == 0);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < 2; i++)
		CHECK(waitpid(children[i], &status, 0) == children[i] && status == 0);
	uint64_t sum = 0;
	CHECK(pread(ends[0], values, sizeof values, AT) == sizeof values);
	for (int i = 0; i < COUNTERS; i++)
		sum += values[i];
	CHECK(sum == 3 * 300 + 2 * 400);
	close_ends();
}

int main(int argument_count, char **arguments)
{
	const char *name = argument_count > 1 ? arguments[1] : "";
	int times = argument_count > 2 ? atoi(arguments[2]) : 1;
	if (!strcmp(name, "kept"))
		kept(times);
	else if (!strcmp(name, "closed"))
		closed(times);
	else if (!strcmp(name, "rights"))
		rights();
	else if (!strcmp(name, "waits"))
		waits(times);
	else if (!strcmp(name, "count"))
		count(arguments);
	else if (!strcmp(name, "adds"))
		count_in_other();
	else
		return 2;
	return 0;
}
